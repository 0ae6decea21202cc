"""Ranks that share layers do the same in every step while a plan is searched for."""

import json
from typing import Any

import pytest

from ssdtrain.counters import Fallback
from tests.ranks import run_ranks
from tests.ssdtrain.engines import beside_ranks

Said = list[dict[str, Any]]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Said:
    """What both ranks said, of all cases."""
    out = tmp_path_factory.mktemp("beside")
    run_ranks([beside_ranks.__file__, out], out)
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("name", beside_ranks.cases())
def test_ranks_change_plans_and_observe_in_the_same_steps(
    results: Said, name: str
) -> None:
    """However late one of them is: a region that runs again on one rank alone would
    meet other collectives."""
    first, second = (rank[name] for rank in results)
    # A rank may learn a step later that the plan in force stays.
    begin = int(name == "tp stays")
    said = [[event[begin:] for event in each["events"]] for each in (first, second)]
    assert said[0] == said[1]
    assert first["events"][-1][1] >= 1, "a plan is in force"
    for rank in (first, second):
        assert rank["equal"]
        assert Fallback.PLANNED_ALONE.value not in rank["fallbacks"]
        if "recompute" in beside_ranks.cases()[name].settings:
            assert rank["rerun"] > 0
        assert rank["communicates"] == name.startswith(
            ("tp regions", "tp tried", "tp stays")
        )


@pytest.mark.parametrize("name", beside_ranks.cases())
def test_nothing_is_observed_twice(results: Said, name: str) -> None:
    """Plans that are compared with plain steps are not looked at by their drift
    before."""
    stages = [stage for stage, _, _ in results[0][name]["events"]]
    settled = stages.index("FOLLOWING")
    assert stages[:settled].count("OBSERVING") <= 2
    assert stages[settled : settled + 10].count("OBSERVING") == 0


def test_ranks_try_checkpointing_together(results: Said) -> None:
    """Whoever leads compares; all follow it, and the plan that is shorter."""
    followed = [digest for _, _, digest in results[0]["tp tried"]["events"] if digest]
    assert len(set(followed)) > 1


def test_all_ranks_leave_room_for_the_one_that_went_beyond_a_limit(
    results: Said,
) -> None:
    """At first its budget is 11,000 bytes. It goes beyond while a plan is searched for
    as well, and asks no more: there is none that leaves four times as much room."""
    for rank in results:
        assert 0 < rank["fsdp2 exceeded"]["peak_bytes"] <= 10000
