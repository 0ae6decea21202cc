"""Every layout on four gloo ranks: bitwise equal, and FSDP2 gathers no more than under
checkpointing."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ssdtrain.counters import Fallback
from tests.ranks import run_ranks
from tests.ssdtrain.engines import layout_ranks

RANKS = 4
Results = list[dict[str, Any]]
TORCH = (
    *("fsdp2", "fsdp2 nested", "fsdp2 nested keep", "fsdp2 x tp", "tp x sequence"),
    *("pp interleaved", "experts", "experts by hand"),
)
MEGATRON = tuple(
    f"megatron {name}" for name in ("tp x sequence", "pp interleaved", "experts")
)
NAMES = TORCH + (MEGATRON if find_spec("megatron") else ())
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What all ranks said, of all layouts."""
    out = tmp_path_factory.mktemp("layouts")
    # megatron-core warns of Apex and Transformer Engine at import.
    command: list[str | Path] = [layout_ranks.__file__, out, *NAMES]
    run_ranks(command, out, RANKS, PYTHONWARNINGS="ignore")
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("name", NAMES)
def test_losses_gradients_and_weights_are_equal(results: Results, name: str) -> None:
    """While tensors move and are made again, under a plan of all ranks too."""
    for rank in results:
        ours = {way: told for way, told in rank[name].items() if "equal" in told}
        assert len(ours) >= (1 if name.startswith("megatron") else 2)
        for way, told in ours.items():
            assert told["equal"], way
            assert told["bytes_recomputed"] > 0, way
            assert not told["refused"] or name.startswith("megatron"), way
            if way != "searched":
                assert told["bytes_offloaded"] > 0, way
            if way == "imposed":
                assert told["policy"] == "moved and again"
            if "experts" not in name:  # their sizes change with the routing
                assert not told["fallbacks"], way


@pytest.mark.parametrize("name", [name for name in TORCH if name.startswith("fsdp2")])
def test_no_weights_are_gathered_oftener_than_under_checkpointing(
    results: Results, name: str
) -> None:
    """In any step: observed, all regions again, under a plan imposed or found."""
    for rank in results:
        theirs = rank[name]["checkpointing"]["gathers"]
        most = theirs[-1]
        assert most >= 3 and set(theirs) == {most}, "checkpointing's steps are alike"
        for way in ("plain", "at once", "imposed", "searched"):
            assert max(rank[name][way]["gathers"]) <= most, way


def test_ranks_that_meet_unknown_ones_make_no_plans(results: Results) -> None:
    """No mesh or wrapper tells who is at the other end of a collective in a region that
    runs again: plans of each rank's own would let it meet another one."""
    for rank in results:
        told = rank["experts by hand"]["searched"]
        assert told["policy"] is None
        assert Fallback.PLAN_MISMATCH.value not in told["fallbacks"]
