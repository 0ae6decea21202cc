"""Feature rows by one setting: where they come from, and where they lie.

`rows` is what ``configs/gnn`` name. Trainers of other packages take what it returns:
they call ``settle`` once, with the device and a number for each row that says how often
it is read, and then ``rows[node_ids]``.
"""

import enum
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from pydirect.gather import index_select
from pydirect.memory import empty_table, pin
from pydirect.ranks import Ranks
from pydirect.tiering import TieredEmbedding, TieredTable, spread_table

RANDOM = "random"
"""Instead of a file: rows of normal numbers, for measurements."""
_AT_ONCE = 1 << 16
_TYPES = (torch.float16, torch.float32, torch.float64)


class FeaturePlace(enum.Enum):
    """Where rows lie."""

    DIRECT = "direct"  # host memory; the GPU reads it in place
    TIERED = "tiered"  # as direct, with the hottest rows in GPU memory
    PEERS = "peers"  # as tiered, the hottest rows dealt out over the GPUs of all ranks
    DEVICE = "device"  # GPU memory


def rows(
    source: str | None = None,
    place: FeaturePlace | str = FeaturePlace.DEVICE,
    *,
    width: int | None = None,
    cache_bytes: int | None = None,
    seed: int = 0,
    max_sms: int | None = 8,
) -> "FeatureRows | HostEmbedding | None":
    """Make what a trainer takes as its features.

    Args:
        source: a ``.npy`` file with a row for each node, or "random"; None: learned
            embeddings, in host memory unless ``place`` is "device".
        place: where the rows lie.
        width: of random rows.
        cache_bytes: GPU memory for the hottest rows, with "tiered" and "peers"; None
            for what is free less a fifth of the GPU.
        seed: of random rows.
        max_sms: multiprocessors of the GPU for a gather from host memory; None lets
            the gather decide. Sixteen fill the link while training goes on.

    Returns:
        None for embeddings in GPU memory, which are the trainer's own.

    Raises:
        ValueError: a setting without its use, or ``peers`` for embeddings, whose copies
            would have to follow every update on every GPU.
    """
    where = FeaturePlace(place)
    check_cache(cache_bytes)
    if cache_bytes is not None and where not in (
        FeaturePlace.TIERED,
        FeaturePlace.PEERS,
    ):
        raise ValueError(
            "features.cache_bytes: expects null where features.place is "
            f"{where.value}, got {cache_bytes}"
        )
    if source is not None:
        return FeatureRows(
            *(source, where),
            width=width,
            cache_bytes=cache_bytes,
            seed=seed,
            max_sms=max_sms,
        )
    if where is FeaturePlace.PEERS:
        raise ValueError(
            "features.place: expects device, direct or tiered for embeddings "
            "(features.source=null), got peers"
        )
    if where is FeaturePlace.DEVICE:
        return None
    return HostEmbedding(0 if where is FeaturePlace.DIRECT else cache_bytes)


def check_cache(cache_bytes: int | None) -> None:
    """
    Raises:
        ValueError: fewer bytes than none.
    """
    if cache_bytes is not None and cache_bytes < 0:
        raise ValueError(f"features.cache_bytes: expects 0 or more, got {cache_bytes}")


class FeatureRows:
    """Rows of a file for node ids, on the device."""

    def __init__(
        self,
        source: str,
        place: FeaturePlace | str,
        *,
        width: int | None = None,
        cache_bytes: int | None = None,
        seed: int = 0,
        max_sms: int | None = 8,
    ) -> None:
        """See `rows`."""
        if max_sms is not None and max_sms < 1:
            raise ValueError(
                f"features.max_sms: expects at least 1, or null, got {max_sms}"
            )
        if source == RANDOM and (width is None or width < 1):
            raise ValueError(
                "features.width: expects 1 or more with features.source=random, got "
                f"{width}"
            )
        self.place = FeaturePlace(place)
        self._source, self._width, self._seed = source, width, seed
        self._cache_bytes, self._max_sms = cache_bytes, max_sms
        self._gather: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.device = torch.device("cpu")

    def settle(self, device: torch.device, heat: torch.Tensor) -> None:
        """Put the rows where they are to lie; all ranks call it.

        Args:
            device: that reads them.
            heat: shape (num_nodes,): how often each row is read, with "tiered" and
                "peers".

        Raises:
            ValueError: a file that is no table of ``num_nodes`` rows, or GPUs that do
                not reach one another with ``peers``.
        """
        ranks = Ranks.join(str(device))
        self.device = ranks.device
        number = len(heat)
        host = ranks.share(self._read(number) if ranks.is_first else None)
        gpu = self.device.type == "cuda"
        heat = heat.float().cpu()
        if self.place is FeaturePlace.DEVICE:
            near = host.to(self.device)
            self._gather = lambda ids: near.index_select(0, ids)
            return
        if gpu:
            host = pin(host)
        if self.place is FeaturePlace.DIRECT:
            self._gather = partial(index_select, host, max_sms=self._max_sms)
            return
        if self.place is FeaturePlace.TIERED:
            table = TieredTable(
                host, heat, device=self.device, budget_bytes=self._cache_bytes
            )
        else:
            if not ranks.reach_all():
                raise ValueError(
                    "features.place: peers expects several ranks whose GPUs reach one "
                    f"another, got {ranks.size}: start them by torchrun, or set tiered"
                )
            table = spread_table(ranks, host, heat, budget_bytes=self._cache_bytes)
        self._gather = partial(table.index_select, max_sms=self._max_sms)

    def __getitem__(self, node_ids: torch.Tensor) -> torch.Tensor:
        """Rows of int64 ids of any device, shape (len(node_ids), width).

        Raises:
            RuntimeError: before `settle`.
        """
        if self._gather is None:
            raise RuntimeError("features: expects settle(device, heat) before rows")
        return self._gather(node_ids.to(self.device))

    def _read(self, num_rows: int) -> torch.Tensor:
        if self._source == RANDOM:
            generator = torch.Generator().manual_seed(self._seed)
            found = empty_table((num_rows, self._width or 1), torch.float32)
            return found.normal_(generator=generator)
        return read_rows(self._source, num_rows)


class HostEmbedding:
    """Learned rows in host memory, the hottest of them in GPU memory too."""

    def __init__(self, cache_bytes: int | None) -> None:
        """``cache_bytes``: GPU memory for copies; None for what is free, 0 for none."""
        self._cache_bytes = cache_bytes

    def embedding(
        self, weight: torch.Tensor, heat: torch.Tensor, device: torch.device
    ) -> TieredEmbedding:
        """Make a module of rows; its ``sparse_optimizer`` makes the optimizer.

        Args:
            weight: CPU, shape (num_nodes, width): first values.
            heat: shape (num_nodes,): how often each row is read.
            device: where rows are wanted.
        """
        return TieredEmbedding(
            weight, heat.float().cpu(), device=device, budget_bytes=self._cache_bytes
        )


class DeviceFetch:
    """A `pydirect.loader.Fetch` over rows in GPU memory, into buffers that take
    turns."""

    uses_cpu = False
    max_sms: int | None = None

    def __init__(
        self, table: torch.Tensor, device: torch.device, num_slots: int
    ) -> None:
        """``table``: copied to the device; ``num_slots``: batches there at once."""
        self._table = table.to(device)
        self._buffers: list[torch.Tensor | None] = [None] * num_slots

    def rows(self, node_ids: torch.Tensor, slot: int) -> torch.Tensor:
        """See `pydirect.loader.Fetch.rows`."""
        table, num = self._table, len(node_ids)
        buffer = self._buffers[slot]
        if buffer is None or buffer.shape[0] < num:
            buffer = table.new_empty((num + num // 10, *table.shape[1:]))
            self._buffers[slot] = buffer
        index = node_ids.to(table.device, non_blocking=True)
        return torch.index_select(table, 0, index, out=buffer[:num])


def read_rows(path: str | Path, num_rows: int) -> torch.Tensor:
    """Read a ``.npy`` file of floating-point rows into memory that GPUs read.

    Raises:
        ValueError: no such file, no such array, another number of rows, or a value that
            is not finite.
    """
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(
            f"features.source: expects a .npy file, got {path} ({error})"
        ) from error
    if not isinstance(array, np.ndarray) or array.ndim != 2 or not array.shape[1]:
        shape = list(getattr(array, "shape", ()))
        raise ValueError(f"{path}: expects one array of rows, got shape {shape}")
    kind = array.dtype.newbyteorder("=")
    if kind not in (np.float16, np.float32, np.float64):
        raise ValueError(f"{path}: expects float16, 32 or 64, got {array.dtype}")
    if len(array) != num_rows:
        raise ValueError(
            f"{path}: expects a row for each of {num_rows} nodes, got {len(array)}"
        )
    dtype = {t.itemsize: t for t in _TYPES}[array.dtype.itemsize]
    found = empty_table(array.shape, dtype)
    for first in range(0, num_rows, _AT_ONCE):
        part = np.array(array[first : first + _AT_ONCE], dtype=kind)
        finite = np.isfinite(part)
        if not finite.all():
            row, column = np.argwhere(~finite)[0].tolist()
            raise ValueError(
                f"{path}: expects finite numbers, got {part[row, column]} at row "
                f"{first + row}, column {column}"
            )
        found[first : first + len(part)] = torch.from_numpy(part)
    return found
