"""Which rank holds which embedding table: the fastest of the rules of Lin 2023, Table
5.3 (by index, at random, greedily by a cost of size and lookups), priced by the same
models as any step: lookups, an all-to-all, and the dense part."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ssdtrain.errors import ConfigError
from ssdtrain.tools.foresight import calls
from ssdtrain.tools.foresight.collectives import Collective, Network, all_to_all_bytes
from ssdtrain.tools.foresight.device import DeviceCosts
from ssdtrain.tools.foresight.graph import Stream
from ssdtrain.tools.foresight.reuse import distinct_share
from ssdtrain.tools.foresight.simulate import Task, simulate_ranks


@dataclass(frozen=True, kw_only=True)
class EmbeddingTable:
    """One embedding table."""

    rows: int
    width: int
    """Elements of a row."""
    lookups: float
    """Rows looked up a sample."""
    distinct_share: float = 1.0
    """Different rows over lookups in a batch: 1 where no row is hit twice."""
    reuse_factors: tuple[float, ...] | None = None
    """In place of it: lookups by how often their row is hit; see `reuse`."""

    def __post_init__(self) -> None:
        if self.reuse_factors is not None:
            share = distinct_share(self.reuse_factors)
            object.__setattr__(self, "distinct_share", share)


Sharding = tuple[int, ...]
"""The rank of each table."""


COSTS: Mapping[str, Callable[[EmbeddingTable], float]] = {
    "size": lambda t: float(t.rows),
    "lookup": lambda t: t.lookups * t.width,
    "norm_lookup": lambda t: t.lookups / t.rows,
    "size_lookup": lambda t: t.lookups * t.width * math.log10(max(2, t.rows)),
}


def naive(tables: Sequence[EmbeddingTable], num_ranks: int) -> Sharding:
    """By index."""
    return tuple(i % num_ranks for i in range(len(tables)))


def random_sharding(
    tables: Sequence[EmbeddingTable], num_ranks: int, seed: int = 0
) -> Sharding:
    """At random."""
    rng = random.Random(seed)
    return tuple(rng.randrange(num_ranks) for _ in tables)


def greedy(
    tables: Sequence[EmbeddingTable],
    num_ranks: int,
    cost: Callable[[EmbeddingTable], float],
) -> Sharding:
    """The dearest table first, always to the rank with the least so far."""
    loads = [0.0] * num_ranks
    ranks = [0] * len(tables)
    for index in sorted(range(len(tables)), key=lambda i: -cost(tables[i])):
        rank = min(range(num_ranks), key=loads.__getitem__)
        ranks[index] = rank
        loads[rank] += cost(tables[index])
    return tuple(ranks)


def candidates(
    tables: Sequence[EmbeddingTable], num_ranks: int, seed: int = 0
) -> dict[str, Sharding]:
    """Every rule's answer, by its name."""
    found = {
        "naive": naive(tables, num_ranks),
        "random": random_sharding(tables, num_ranks, seed),
    }
    for name, cost in COSTS.items():
        found[name] = greedy(tables, num_ranks, cost)
    return found


@dataclass(frozen=True, kw_only=True)
class Lookups:
    """Prices the embedding part of a step under a sharding."""

    device: DeviceCosts
    fabric: Network
    batch: int
    """Samples of a step, over all ranks."""
    dense_us: float = 0.0
    """Of the dense part, forward and backward, on every rank."""

    def step_us(
        self, tables: Sequence[EmbeddingTable], sharding: Sharding, num_ranks: int
    ) -> float:
        """Predicted time: lookups, all-to-all, dense part, all-to-all, backward. Raises
        ConfigError: the sharding names a rank that there is not, or too few tables."""
        if len(sharding) != len(tables) or not all(
            0 <= rank < num_ranks for rank in sharding
        ):
            raise ConfigError(
                f"a sharding of {len(tables)} tables names ranks 0 to {num_ranks - 1}, "
                f"got {sharding}"
            )
        widths = [0.0] * num_ranks
        for table, rank in zip(tables, sharding, strict=True):
            widths[rank] += table.width
        message = all_to_all_bytes(widths, self.batch, 4)
        moved = self.fabric.microseconds(Collective.ALL_TO_ALL, message, num_ranks)
        ranks = []
        for rank in range(num_ranks):
            own = [t for t, at in zip(tables, sharding, strict=True) if at == rank]
            ranks.append(self._tasks(own, moved))
        return simulate_ranks(ranks).step_us

    def _tasks(self, own: Sequence[EmbeddingTable], moved_us: float) -> list[Task]:
        forward = sum(self.table_us(table, "lookup") for table in own)
        backward = sum(self.table_us(table, "scatter_add") for table in own)
        exchange = Task(
            name="exchange", device_us=moved_us, stream=Stream.COMMUNICATION
        )
        return [
            Task(name="lookups", device_us=forward),
            replace(exchange, group="out", after=(0,)),
            Task(name="dense", device_us=self.dense_us, after=(1,)),
            replace(exchange, group="back", after=(2,)),
            Task(name="update", device_us=backward, after=(3,)),
        ]

    def table_us(self, table: EmbeddingTable, variant: str) -> float:
        """Of one table's rows, of the whole batch."""
        rows = max(1, round(self.batch * table.lookups))
        call = calls.lookup(
            variant,
            rows=rows,
            columns=table.width,
            table_rows=table.rows,
            distinct_rows=max(1.0, rows * table.distinct_share),
            dtype="fp32",
        )
        return self.device.kernel_us(call)
