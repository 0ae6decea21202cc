"""A sharding of embedding tables: the file, and two ranks that train with it."""

import json
from pathlib import Path

import pytest
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec

from ssdtrain.errors import ConfigError, DamagedFileError
from ssdtrain.tools.cli import main
from ssdtrain.tools.foresight.sharding import EmbeddingTable
from ssdtrain.tools.foresight.table_plan import TABLE_PLAN_FILE, table_plan
from tests.ranks import run_ranks

HERE = Path(__file__).parent
TABLES = [
    EmbeddingTable(rows=rows, width=width, lookups=3)
    for rows, width in ((40, 8), (25, 4), (7, 16), (60, 8))
]


def test_the_file_has_torchrecs_fields(tmp_path: Path) -> None:
    plan = table_plan("size", TABLES, (1, 0, 1, 0), 2)
    path = tmp_path / "plan.json"
    TABLE_PLAN_FILE.write(path, plan)
    assert TABLE_PLAN_FILE.read(path) == plan
    table = plan.tables["table_2"]
    assert (table.sharding_type, table.compute_kernel) == ("table_wise", "dense")
    assert table.ranks == (1,) and (table.rows, table.width) == (7, 16)
    spec = table.sharding_spec
    assert isinstance(spec, EnumerableShardingSpec)
    [shard] = spec.shards
    assert shard.placement.rank() == 1 and shard.shard_sizes == [7, 16]
    assert str(shard.placement.device()) == "cuda:1"
    assert json.loads(path.read_text())["tables"]["table_0"]["mesh"] == [1]


def test_what_cannot_be_placed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expects as many ranks"):
        table_plan("size", TABLES, (0,), 2)
    path = tmp_path / "plan.json"
    TABLE_PLAN_FILE.write(path, table_plan("size", TABLES, (1, 0, 1, 0), 2))
    values = json.loads(path.read_text())
    for field, value in (("ranks", [0, 1]), ("mesh", [0]), ("sharding_type", "x")):
        changed = json.loads(path.read_text())
        changed["tables"]["table_0"][field] = value
        with pytest.raises(DamagedFileError, match="table_0"):
            TABLE_PLAN_FILE.from_json(changed)
    with pytest.raises(DamagedFileError, match="a rank of the plan"):
        TABLE_PLAN_FILE.from_json({**values, "num_ranks": 1})


def test_two_ranks_train_with_a_plan(tmp_path: Path) -> None:
    """The losses and the tables are those of one process, to float64's rounding: spread
    by the command, and all on the first rank."""
    spread, one = tmp_path / "spread.json", tmp_path / "one.json"
    tables = [{"rows": t.rows, "width": t.width, "lookups": t.lookups} for t in TABLES]
    given = tmp_path / "tables.json"
    given.write_text(json.dumps(tables))
    words = ["foresight", "shard", "--tables", str(given), "--ranks", "2"]
    assert main([*words, "--micro-batch", "12", "--save", str(spread)]) == 0
    TABLE_PLAN_FILE.write(one, table_plan("one", TABLES, (0, 0, 0, 0), 2, "cpu"))
    out = tmp_path / "out.json"
    run_ranks([HERE / "table_ranks.py", out, spread, one], tmp_path, num_ranks=2)
    both = json.loads(out.read_text())
    for path, found in zip((spread, one), both, strict=True):
        plan = TABLE_PLAN_FILE.read(path)
        for rank, own in enumerate(found):
            assert own["losses"] == pytest.approx(own["alone"], rel=1e-13)
            assert own["losses"][-1] < own["losses"][0]
            assert own["worst"] < 1e-13
            sizes = [t.rows * t.width for t in plan.tables.values() if t.rank == rank]
            assert own["held"] == sum(sizes)
        assert found[0]["held"] > 0 and (found[1]["held"] > 0) == (path == spread)
