"""A sharding of embedding tables as a file that trainers take: the fields of torchrec's
`ParameterSharding`, and DTensor placements on a mesh's axes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec

from ssdtrain.errors import ConfigError
from ssdtrain.jsonfile import Format, Natural, Unfit
from ssdtrain.tools.foresight.sharding import EmbeddingTable, Sharding

TABLE_WISE, DENSE, REPLICATE = "table_wise", "dense", "Replicate()"


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A part of a table, and where it is (torchrec's `ShardMetadata`)."""

    shard_offsets: tuple[Natural, ...]
    shard_sizes: tuple[Natural, ...]
    placement: str
    """Such as `rank:1/cuda:1`."""


@dataclass(frozen=True, kw_only=True)
class PlacedTable:
    """A table's place, for torchrec and for DTensor."""

    sharding_type: str
    compute_kernel: str
    ranks: tuple[Natural, ...]
    shards: tuple[Shard, ...]
    mesh: tuple[Natural, ...]
    """Ranks of the table's own `DeviceMesh`."""
    placements: tuple[str, ...]
    """One for each axis of that mesh."""

    @property
    def rank(self) -> int:
        """The one that holds the table."""
        [rank] = self.ranks
        return rank

    @property
    def rows(self) -> int:
        """Of the whole table."""
        return self.shards[0].shard_sizes[0]

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self.shards[0].shard_sizes[1]

    @property
    def sharding_spec(self) -> EnumerableShardingSpec:
        """What torchrec's `ParameterSharding` holds."""
        return EnumerableShardingSpec(
            [
                ShardMetadata(
                    shard_offsets=list(shard.shard_offsets),
                    shard_sizes=list(shard.shard_sizes),
                    placement=shard.placement,
                )
                for shard in self.shards
            ]
        )


@dataclass(frozen=True, kw_only=True)
class TablePlan:
    """Where every table is."""

    rule: str
    """That gave the sharding."""
    num_ranks: Natural
    tables: Mapping[str, PlacedTable]
    """By name, in the order of the model's."""


def table_plan(
    rule: str,
    tables: Sequence[EmbeddingTable],
    sharding: Sharding,
    num_ranks: int,
    device: str = "cuda",
) -> TablePlan:
    """Return the plan that puts every table whole on its rank; a CPU's ranks share
    one."""

    def placed(table: EmbeddingTable, rank: int) -> PlacedTable:
        where = f"{device}:{rank}" if device != "cpu" else device
        shard = Shard(
            shard_offsets=(0, 0),
            shard_sizes=(table.rows, table.width),
            placement=f"rank:{rank}/{where}",
        )
        return PlacedTable(
            sharding_type=TABLE_WISE,
            compute_kernel=DENSE,
            ranks=(rank,),
            shards=(shard,),
            mesh=(rank,),
            placements=(REPLICATE,),
        )

    if len(sharding) != len(tables):
        raise ConfigError(
            f"a sharding of {len(tables)} tables expects as many ranks, got {sharding}"
        )
    return TablePlan(
        rule=rule,
        num_ranks=num_ranks,
        tables={
            f"table_{number}": placed(table, rank)
            for number, (table, rank) in enumerate(zip(tables, sharding, strict=True))
        },
    )


def _check(plan: TablePlan) -> None:
    for name, table in plan.tables.items():
        where = f"tables.{name}"
        if table.sharding_type != TABLE_WISE or len(table.shards) != 1:
            raise Unfit(where, f"a table that is {TABLE_WISE}", table.sharding_type)
        if len(table.ranks) != 1 or table.mesh != table.ranks:
            raise Unfit(f"{where}.ranks", "one rank, and a mesh of it", table.ranks)
        if table.rank >= plan.num_ranks:
            raise Unfit(f"{where}.ranks", "a rank of the plan", table.rank)
        if len(table.shards[0].shard_sizes) != 2:
            sizes = table.shards[0].shard_sizes
            raise Unfit(f"{where}.shards[0].shard_sizes", "rows and width", sizes)


TABLE_PLAN_FILE = Format(
    kind=TablePlan,
    schema="ssdtrain-table-plan",
    version=1,
    what="a plan of embedding tables",
    remedy="make it again with `ssdtrain foresight shard`",
    check=_check,
)
