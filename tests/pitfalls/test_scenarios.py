"""Every scenario under ssdtrain, for every target; and that peers are judged fairly."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

import ssdtrain

sys.path.insert(0, str(Path(__file__).parent))
from scenarios import (
    ROWS,
    Holder,
    Row,
    Runner,
    changed_after_save,
    cheap_result_changed_after_save,
    verdict,
)

MOVES = {"min_bytes": 0, "plan": "offload-all", "window_bytes": 1}
REFUSED = (changed_after_save, cheap_result_changed_after_save)
WAYS: dict[str, dict[str, Any]] = {
    "host": {"max_overhead": 0.01, "target": "host", "recompute": "off"},
    "recipes": {"max_overhead": 0.01, "target": "host", "recompute": "auto"},
    "ssd": {
        "max_overhead": 0.01,
        "target": "ssd",
        "recompute": "off",
        "verify": "shadow",
    },
}


@pytest.fixture
def ours(tmp_path: Path) -> Any:
    """Makes runners under a session, and closes what it made."""
    sessions = []

    def make(way: str) -> Runner:
        settings = {**MOVES, "host_bytes": 64 << 20, **WAYS[way]}
        if settings["target"] == "ssd":
            settings["directory"] = str(tmp_path)
        runner = Runner("cpu")
        runner.session = ssdtrain.offload(runner.holder, **settings)
        sessions.append(runner.session)
        return runner

    yield make
    for session in sessions:
        session.close()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.scenario.__name__)
def test_scenario(row: Row, way: str, ours: Callable[[str], Runner]) -> None:
    refused = row.scenario in REFUSED
    runner = ours(way)
    said = verdict(row, Runner("cpu"), lambda: runner)
    assert said == ("refused" if refused else "equal")
    if not refused:
        assert sum(step.bytes_saved for step in runner.session.steps) > 0


def test_verdicts_tell_wrong_from_right() -> None:
    """The judge itself: a hook that zeroes, one that raises, one that does nothing."""

    def under(unpack: Callable[[Any], Any]) -> Callable[[], Runner]:
        class Broken(Runner):
            def around_forward(self) -> AbstractContextManager[Any]:
                return torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack)

        return lambda: Broken("cpu")

    def fail(tensor: Any) -> Any:
        raise IndexError("lost")

    def shift(tensor: Any) -> Any:
        return tensor + 1

    row, refusal = ROWS[2], Row(changed_after_save, "")
    assert verdict(row, Runner("cpu"), under(shift)) == "WRONG gradients"
    assert verdict(row, Runner("cpu"), under(fail)) == "IndexError: lost"
    assert verdict(row, Runner("cpu"), under(lambda t: t)) == "equal"
    assert verdict(refusal, Runner("cpu"), under(lambda t: t)).startswith("WRONG: ran")


def test_the_holder_is_the_same_every_time() -> None:
    assert torch.equal(Holder().weight, Holder().weight)
