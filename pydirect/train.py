"""Node classification with sampled neighbourhoods: the trainer after the recipes.

Built by Hydra from ``configs/gnn/*.yaml`` (``_target_``), or by hand. The features stay
in host memory; `FetchMode` says how they reach the GPU. Under torchrun there is one
process a GPU, and they share graph and features; see `pydirect.ranks`.
"""

import enum
import functools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from pydirect.captured import CapturedStep
from pydirect.datasets import NodeDataset
from pydirect.features import DeviceFetch, check_cache
from pydirect.loader import (
    DirectFetch,
    Fetch,
    LoaderConfig,
    MiniBatch,
    MiniBatchLoader,
    Sampling,
    StagedFetch,
    settled_for,
)
from pydirect.memory import pin
from pydirect.ranks import Ranks
from pydirect.sampling import Graph, ResidentGraph
from pydirect.tiering import (
    Score,
    TieredFetch,
    TieredTable,
    score_nodes,
    spread_table,
)

_CHECKPOINT = "checkpoint.pt"
_METRICS = "metrics.jsonl"


class FetchMode(enum.Enum):
    """How feature rows reach the training device."""

    DIRECT = "direct"  # the GPU gathers from host memory
    STAGED = "staged"  # PyG's way: CPU gather, pin, copy
    TIERED = "tiered"  # as direct, with the hottest rows in GPU memory
    PEERS = "peers"  # as tiered, and only where GPUs of all ranks reach one another
    DEVICE = "device"  # rows in GPU memory


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What a run has reached."""

    losses: tuple[float, ...]
    """Mean training loss, epoch by epoch, those before a checkpoint included."""

    valid_accuracy: float
    test_accuracy: float
    epoch_seconds: float
    """Mean wall time of a training epoch."""

    peak_device_bytes: int
    """Peak of PyTorch's CUDA allocator; 0 without a GPU."""


@dataclass(kw_only=True)
class NodeClassificationTrainer:
    """Trains a PyG model on a `NodeDataset`."""

    dataset: NodeDataset
    model: Callable[..., torch.nn.Module]
    """Called with in_channels and out_channels; a PyG model with as many layers as the
    loader has fanouts (for instance ``torch_geometric.nn.GraphSAGE``)."""

    loader: LoaderConfig = field(default_factory=LoaderConfig)
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam
    """Called with the parameters."""

    fetch: FetchMode | str = FetchMode.DIRECT
    score: Score | str = Score.WEIGHTED_REVERSE_PAGERANK
    """With ``fetch=tiered``: which rows are hot."""

    cache_bytes: int | None = None
    """With ``fetch=tiered``: GPU memory for hot rows, in bytes of each GPU; None takes
    what is free less a fifth of the GPU. GPUs that reach one another hold different
    rows."""

    capture: bool = False
    """Repeat forward and backward as one CUDA graph on padded batches: for steps that
    are short on the GPU and long on the host. See `CapturedStep` for what it needs."""

    epochs: int = 10
    seed: int = 0
    device: str = "auto"
    """"auto" takes the GPU if there is one."""

    device_bytes: int | None = None
    """GPU memory that PyTorch's allocator may take in this process, in bytes; None
    leaves it as it is. The features do not count: they stay in host memory."""

    run_directory: str | None = None
    """Where metrics.jsonl and checkpoint.pt go; None writes nothing."""

    resume: bool = False
    """Continue from checkpoint.pt in ``run_directory``, if there is one."""

    progress: bool = True
    ranks: Ranks | None = None
    """The processes that train together; None: those that torchrun has started.
    ``loader.batch_size`` is of each of them."""

    def __post_init__(self) -> None:
        self.fetch = FetchMode(self.fetch)
        self.score = Score(self.score)
        if self.epochs < 1:
            raise ValueError(f"epochs: expects 1 or more, got {self.epochs}")
        if self.cache_bytes is not None:
            if self.fetch not in (FetchMode.TIERED, FetchMode.PEERS):
                raise ValueError(
                    "features.cache_bytes: expects null where features.place is "
                    f"{self.fetch.value}, got {self.cache_bytes}"
                )
            check_cache(self.cache_bytes)
        if self.resume and self.run_directory is None:
            raise ValueError("resume: expects run_directory, where checkpoint.pt lies")
        if self.run_directory is not None:
            make_directory(self.run_directory)
        torch.manual_seed(self.seed)
        self.together = self.ranks or Ranks.join(self.device)
        self.target = self.together.device
        if self.device_bytes is not None:
            limit_device_memory(self.target, self.device_bytes)
        self.network = self.model(
            in_channels=self.dataset.num_features,
            out_channels=self.dataset.num_classes,
        ).to(self.target)
        if hasattr(self.network, "convs"):  # PyG's; others may take rows as they are
            self.network.register_forward_pre_hook(_in_its_type)
        hops, layers = len(self.loader.fanouts), getattr(self.network, "num_layers", 0)
        if layers and layers != hops:
            raise ValueError(
                f"loader.fanouts: expects one number for each of the model's {layers} "
                f"layers, got {list(self.loader.fanouts)}: set it or model.num_layers"
            )
        self.solver = self.optimizer(self.network.parameters())
        self.batches = self._loader(self.dataset.train_nodes, shuffle=True)
        self._earlier = self._load() if self.resume else Reached(-1, [], [])
        self._first_epoch = self._earlier.epoch + 1
        self._captured = self._new_captured() if self.capture else None
        self._replica = self.together.replicate(self.network)

    def run(self) -> dict[str, Any]:
        """Train, measure, and return the result as plain values."""
        result = self.fit()
        if self.together.is_first:
            print(
                f"{self.dataset.name} graph: test accuracy "
                f"{100 * result.test_accuracy:.2f} %, "
                f"{result.epoch_seconds:.2f} s an epoch"
            )
        values = {name: getattr(result, name) for name in result.__dataclass_fields__}
        if self.target.type != "cuda":
            del values["peak_device_bytes"]  # nobody counts it
        return {"device": str(self.target), **values, "losses": list(result.losses)}

    def fit(self) -> TrainResult:
        """Train the epochs that are left, then measure accuracy."""
        if self.target.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.target)
        losses, seconds = list(self._earlier.losses), list(self._earlier.seconds)
        directory = self.run_directory if self.together.is_first else None
        with _Metrics(directory, append=self._first_epoch > 0) as log:
            for epoch in range(self._first_epoch, self.epochs):
                begun = time.perf_counter()
                losses.append(self.train_epoch(epoch))
                seconds.append(time.perf_counter() - begun)
                accuracy = self.accuracy(self.dataset.valid_nodes)
                log(epoch=epoch, loss=losses[-1], valid=accuracy, seconds=seconds[-1])
                self._save(Reached(epoch, losses, seconds))
            valid = self.accuracy(self.dataset.valid_nodes)
            test = self.accuracy(self.dataset.test_nodes)
            log(valid=valid, test=test)
        peak = 0
        if self.target.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.target)
        return TrainResult(
            losses=tuple(losses),
            valid_accuracy=valid,
            test_accuracy=test,
            epoch_seconds=sum(seconds) / max(1, len(seconds)),
            peak_device_bytes=peak,
        )

    def train_epoch(self, epoch: int) -> float:
        """Pass over the training nodes once; return the mean loss a node."""
        self.network.train()
        self.batches.epoch = epoch
        # Dropout repeats after a resume: the epoch decides, not what ran before.
        number = self.seed * 1_000_003 + epoch
        torch.manual_seed(number + (self.together.rank << 40))
        total = torch.zeros((), device=self.target)
        shown = self.progress and self.together.is_first
        for batch in _bar(self.batches, f"epoch {epoch}", shown):
            total += self.step(batch).detach() * batch.num_counted
        return float(self.together.total(total)) / len(self.dataset.train_nodes)

    def step(self, batch: MiniBatch) -> torch.Tensor:
        """Forward, backward and update; returns the loss, shape ()."""
        if self._captured is not None:
            loss = self._captured(batch)
            self.solver.step()
            return loss
        self.solver.zero_grad(set_to_none=True)
        scores = self.scores(batch, self._replica)
        loss = torch.nn.functional.cross_entropy(scores, batch.y)
        # Gradients are averaged over the processes; with the weights that is the mean
        # over their seeds.
        (loss if batch.weight == 1.0 else loss * batch.weight).backward()
        self.solver.step()
        return loss

    def scores(
        self, batch: MiniBatch, network: torch.nn.Module | None = None
    ) -> torch.Tensor:
        """Compute class scores of the seeds, shape (num_seeds, num_classes).

        Each layer computes only what later layers read (PyG's trimming by hops).
        """
        out: torch.Tensor = (network or self.network)(
            batch.x,
            batch.edge_index,
            num_sampled_nodes_per_hop=list(batch.num_nodes_per_hop),
            num_sampled_edges_per_hop=list(batch.num_edges_per_hop),
        )
        return out[: batch.num_seeds]

    @torch.no_grad()
    def accuracy(self, nodes: torch.Tensor) -> float:
        """Measure the share of ``nodes`` classified rightly, on samples."""
        self.network.eval()
        right = torch.zeros((), dtype=torch.int64, device=self.target)
        for batch in self._loader(nodes, shuffle=False):
            if batch.num_counted:
                right += (self.scores(batch).argmax(1) == batch.y).sum()
        return int(self.together.total(right)) / max(1, len(nodes))

    def _new_captured(self) -> CapturedStep:
        if self.together.size > 1:
            raise ValueError(
                "capture: expects one process, whose gradients are not averaged, got "
                f"{self.together.size}: set trainer.capture=false"
            )
        return CapturedStep(self.network, self.loader.batch_size)

    @functools.cached_property
    def sampled_graph(self) -> Graph | ResidentGraph:
        """What loaders sample from: settled once where the device draws."""
        where = Sampling(self.loader.sampling)
        if where is Sampling.THREADS:
            return self.dataset.graph
        return settled_for(self.dataset.graph, self.target, where)

    def new_fetch(self) -> Fetch:
        """Make the features' way to the device, with buffers of its own."""
        if self.fetch is FetchMode.STAGED:
            return StagedFetch(self.dataset.features, self.target)
        if self.fetch is FetchMode.DEVICE:
            return DeviceFetch(
                self.dataset.features, self.target, self.loader.num_buffers
            )
        if self.fetch in (FetchMode.TIERED, FetchMode.PEERS):
            loader = self.loader
            return TieredFetch(self.tiered_table, loader.num_buffers, loader.fixed_sms)
        return DirectFetch(
            self.dataset.features,
            self.target,
            num_slots=self.loader.num_buffers,
            max_sms=self.loader.fixed_sms,
        )

    @functools.cached_property
    def tiered_table(self) -> TieredTable:
        """The features with the hottest rows in GPU memory, for all loaders."""
        score = None
        if self.together.is_first:
            score = score_nodes(
                Score(self.score),
                self.dataset.graph,
                self.dataset.train_nodes,
                num_hops=len(self.loader.fanouts),
                device=self.target,
            )
        features = self.dataset.features
        if self.fetch is FetchMode.PEERS and not self.together.reach_all():
            raise ValueError(
                "fetch: peers expects several ranks whose GPUs reach one another, got "
                f"{self.together.size}: start them by torchrun, or set tiered"
            )
        return spread_table(
            self.together,
            pin(features) if self.target.type == "cuda" else features,
            self.together.share(score),
            budget_bytes=self.cache_bytes,
        )

    def _loader(self, nodes: torch.Tensor, *, shuffle: bool) -> MiniBatchLoader:
        given = self.loader
        config = replace(
            given,
            fanouts=tuple(given.fanouts),
            shuffle=shuffle and given.shuffle,
        )
        return MiniBatchLoader(
            self.sampled_graph,
            self.dataset.labels,
            nodes,
            self.new_fetch(),
            config,
            self.target,
            part=(self.together.rank, self.together.size),
        )

    def _save(self, reached: "Reached") -> None:
        if self.run_directory is None or not self.together.is_first:
            return
        state = {
            **reached._asdict(),
            "model": self.network.state_dict(),
            "optimizer": self.solver.state_dict(),
        }
        path = Path(self.run_directory) / _CHECKPOINT
        # Renamed into place: a crash leaves the last whole checkpoint.
        torch.save(state, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)

    def _load(self) -> "Reached":
        """Restore the checkpoint if there is one; returns how far it had come."""
        path = Path(str(self.run_directory)) / _CHECKPOINT
        if not path.is_file():
            return Reached(-1, [], [])
        return read_checkpoint(path, self.target, self.network, self.solver)


class Reached(NamedTuple):
    """How far a checkpoint's run had come."""

    epoch: int
    losses: list[float]
    seconds: list[float]
    """Of each epoch until then."""


def read_checkpoint(
    path: Path,
    device: torch.device,
    network: torch.nn.Module,
    solver: torch.optim.Optimizer,
) -> Reached:
    """Restore a checkpoint's weights and optimizer; returns how far it had come.

    Raises:
        ValueError: the file is damaged, or of another model.
    """
    try:
        state = torch.load(path, map_location=device, weights_only=True)
        network.load_state_dict(state["model"])
        solver.load_state_dict(state["optimizer"])
        figures = ([float(one) for one in state[key]] for key in ("losses", "seconds"))
        return Reached(int(state["epoch"]), *figures)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever the parsers of torch.load raise
        raise ValueError(
            f"{path}: expected a checkpoint of this model, got {type(error).__name__}: "
            f"{error}; remove it to start anew"
        ) from error


def make_directory(name: str) -> None:
    """Make the directory of a run's files.

    Raises:
        ValueError: it cannot be made.
    """
    try:
        Path(name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"run_directory: expects a place for files, got {name} ({error.strerror})"
        ) from error


def limit_device_memory(device: torch.device, num_bytes: int) -> None:
    """Let PyTorch's allocator take ``num_bytes`` of ``device`` at most.

    Raises:
        ValueError: more than the device has, or no GPU to limit.
    """
    if device.type != "cuda":
        raise ValueError(
            f"device_bytes: expects a GPU, got device {device}: leave it null there"
        )
    total = torch.cuda.get_device_properties(device).total_memory
    if not 0 < num_bytes <= total:
        raise ValueError(
            f"device_bytes: expects 1 to {total}, which {device} has, got {num_bytes}"
        )
    torch.cuda.set_per_process_memory_fraction(num_bytes / total, device)


def _in_its_type(network: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Give a network features of the type of its weights: they are widened on the
    device, after they came over the link."""
    x, *rest = inputs
    weight = next(network.parameters(), None)
    return (x if weight is None else x.to(weight.dtype), *rest)


class _Metrics:
    """JSON lines, or nowhere; as a context manager it gives ``log(**values)``."""

    def __init__(self, directory: str | None, *, append: bool) -> None:
        self._directory = directory
        self._mode = "a" if append else "w"
        self._file: IO[str] | None = None

    def __enter__(self) -> Callable[..., None]:
        if self._directory is not None:
            path = Path(self._directory) / _METRICS
            self._file = open(path, self._mode, encoding="utf-8")
        return self._log

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def _log(self, **values: float) -> None:
        if self._file is not None:
            self._file.write(json.dumps(values) + "\n")
            self._file.flush()


def _bar(loader: MiniBatchLoader, description: str, shown: bool) -> Iterator[MiniBatch]:
    if not shown:
        yield from loader
        return
    from rich.progress import track

    yield from track(loader, description=description, total=len(loader))
