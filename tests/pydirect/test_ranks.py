"""Two processes train as one would: shared memory, peers' rows, averaged gradients."""

import json
import os
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from pydirect.memory import HostMemoryError, MemoryLimits, shared
from pydirect.memory.shared import create_shared
from pydirect.ranks import Ranks
from tests.ranks import LONGEST_S, first_error, run_script, server

SCRIPT = Path(__file__).with_name("ranks_script.py")
ROOT = Path(__file__).resolve().parents[2]
LIMITS = MemoryLimits(available_bytes=100, cgroup_free_bytes=None, memlock_bytes=None)


def start(out: Path, rank: int, size: int, port: int) -> BaseProcess:
    """A rank; what it prints is in `log_of` it."""
    place = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # The store is this test's: no rank serves one.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
    }
    words = [str(SCRIPT), str(out)]
    given = words, {**os.environ, **place}, log_of(out, rank, size)
    process = server().Process(target=run_script, args=given)
    process.start()
    return process


def log_of(out: Path, rank: int, size: int) -> Path:
    return out / f"log{rank}of{size}"


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two ranks and one process alone saw of the same run."""
    pytest.importorskip("torch_geometric")
    out = tmp_path_factory.mktemp("ranks")
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    places = [(0, 2), (1, 2), (0, 1)]
    started = [start(out, *place, store.port) for place in places]
    give_up = time.monotonic() + LONGEST_S
    for process in started:
        process.join(max(0.0, give_up - time.monotonic()))
    codes = [process.exitcode for process in started]
    for process in started:
        process.kill()
        process.join()
    logs = [log_of(out, *place).read_text() for place in places]
    assert codes == [0, -signal.SIGKILL, 0], "\n".join(map(first_error, logs))
    names = ("rank0of2", "rank1of2", "rank0of1")
    found = {name: json.loads((out / f"{name}.json").read_text()) for name in names}
    return {**found, "out": out}


def pair(seen: dict[str, Any]) -> list[dict[str, Any]]:
    return [seen["rank0of2"], seen["rank1of2"]]


def test_two_processes_train_as_one_does(seen: dict[str, Any]) -> None:
    alone = seen["rank0of1"]
    for rank in pair(seen):
        for way in ("direct", "tiered"):
            assert rank[way]["losses"] == pytest.approx(alone["direct"]["losses"])
            assert rank[way]["valid"] == alone["direct"]["valid"]
            assert rank[way]["test"] == alone["direct"]["test"]
            assert rank[way]["num_batches"] == alone["direct"]["num_batches"] == 4
            assert rank[way]["weights"] == pytest.approx(
                alone["direct"]["weights"], abs=1e-5
            )
    one, other = pair(seen)
    assert one["direct"]["weights"] == other["direct"]["weights"]


def test_hot_rows_lie_on_both_and_twice_as_many(seen: dict[str, Any]) -> None:
    alone = seen["rank0of1"]["tiered"]
    assert (alone["num_near"], alone["spread"]) == (60, 0)
    for rank in pair(seen):
        assert (rank["tiered"]["num_near"], rank["tiered"]["spread"]) == (120, 120)
        assert rank["tiered"]["hit_ratio"] > 1.5 * alone["hit_ratio"]


def test_rows_come_from_where_the_plan_says(seen: dict[str, Any]) -> None:
    plans = {
        "spread": ([0, 10], 10),
        "mixed": ([2, 4], 6),
        "copies": ([5, 0], 5),
    }
    for rank in pair(seen):
        assert rank["spreading"].pop("empty") is True
        for name, (plan, near) in plans.items():
            found = rank["spreading"][name]
            assert found == {"plan": plan, "near": near, "hot": True, "values": True}


def test_shared_memory_is_one_and_leaves_no_descriptor(seen: dict[str, Any]) -> None:
    for rank in pair(seen):
        assert rank["sharing"]["table"][3] == [-1.0] * 4
        assert rank["sharing"]["table"][2] == [8.0, 9.0, 10.0, 11.0]
        assert rank["sharing"]["odd"] is True
        assert rank["sharing"]["open_files"] == 0
        assert (rank["sum"], rank["least"]) == (3, 5)
        assert rank["dataset"][:3] == ["é", True, True]
        assert rank["dataset"][3] == seen["rank0of1"]["dataset"][3] != 0


def test_one_rank_writes(seen: dict[str, Any]) -> None:
    for size in (1, 2):
        lines = (seen["out"] / f"run{size}/metrics.jsonl").read_text().splitlines()
        epochs = [json.loads(line).get("epoch") for line in lines]
        assert epochs == [0, 1, None]


def test_a_rank_dies(seen: dict[str, Any]) -> None:
    """What was shared stays; the next collective says so, and soon."""
    last = pair(seen)[0]["last"]
    assert last["table"] == [1.0, 2.0, 8.0, 4.0, 5.0, 6.0]
    assert last["told"]


@pytest.mark.filterwarnings("ignore::pydirect.memory.HostMemoryWarning")
def test_refusals(seen: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for number, rank in enumerate(pair(seen)):
        fraction, memory, *both = rank["errors"]
        assert "replicated_share: expects 0 to 1, got 2.0" in fraction
        assert "expects processes of one user in one container" in memory
        # No rank waits for one that cannot go on.
        kind, reach = both
        first = "got 1 of torch.complex64", "cannot be opened"
        other = "the first rank has nothing to share", "open_all: another rank"
        assert (first, other)[number][0] in kind
        assert (first, other)[number][1] in reach
    with pytest.raises(ValueError, match="num_bytes: expects at least 1"):
        create_shared(0)
    monkeypatch.setattr(shared, "read_limits", lambda: LIMITS)
    with pytest.raises(HostMemoryError, match="4096 bytes: the machine has 100 left"):
        create_shared(4096)
    with pytest.raises(ValueError, match="expects the first rank's tensor"):
        Ranks().share(None)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="expects all 4 on one machine"):
        Ranks.join("cpu")


def test_alone_nothing_is_copied_and_nobody_is_waited_for() -> None:
    ranks = Ranks()
    tensor, network = torch.ones(3), torch.nn.Linear(2, 2)
    assert ranks.share(tensor) is tensor
    assert ranks.replicate(network) is network
    assert ranks.is_first and not ranks.reach_all()
    assert ranks.share_numbers(4, 5) == (4, 5)
    assert ranks.least(3) == 3 and int(ranks.total(tensor.sum())) == 3
    ranks.wait()
    ranks.close()
