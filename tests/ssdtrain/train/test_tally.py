"""What a run's steps add up to goes on behind a checkpoint, or is left out whole."""

import dataclasses
import math
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ssdtrain.errors import DamagedFileError
from ssdtrain.plan.plan import Plan
from ssdtrain.train.disk import Written
from ssdtrain.train.loop import Leg
from ssdtrain.train.ranks import Ranks
from ssdtrain.train.runner import Workload
from ssdtrain.train.settings import RunSettings
from ssdtrain.train.tally import Beside, StepTally, Tally
from tests.ssdtrain.plan.profiles import chain

Make = Callable[..., RunSettings]
RANKS = Ranks(rank=0, world_size=1, local_rank=0, local_size=1, launched=False)
WITHOUT, WITH = Leg.WITHOUT.value, Leg.WITH.value


def tally(first: int, *losses: float) -> Tally:
    steps = [
        StepTally(
            loss_hex=loss.hex(),
            step_ms=1.5,
            peak_bytes=100 + n,
            own_ms=1.0,
            idle_ms=2.0,
        )
        for n, loss in enumerate(losses)
    ]
    return Tally(first=first, steps=tuple(steps), process_bytes=10, device_bytes=None)


def beside(
    make: Make,
    run: Path,
    resume: Path | None = None,
    ranks: Ranks = RANKS,
    **groups: dict[str, Any],
) -> Beside:
    train = {**groups.pop("train", {}), **({"resume": str(resume)} if resume else {})}
    settings = make(train=train, **groups)
    settings = dataclasses.replace(settings, run_directory=str(run))
    unused: Any = None
    return Beside(Workload(settings, unused, unused, ranks))


def test_figures_go_on_behind_a_checkpoint(tmp_path: Path, tiny: Make) -> None:
    before = beside(tiny, tmp_path)
    before.note(WITHOUT, tally(0, 3.0, 2.0, 1.0))
    before.note(WITH, tally(0, 3.0, math.nan))
    before.save(WITH, 2, None)
    before.saved(2)
    after = beside(tiny, tmp_path, tmp_path / "checkpoints")
    after.begin(2, [WITHOUT, WITH])
    found = after.so_far(WITHOUT, 2)
    assert found == tally(0, 3.0, 2.0)  # up to the checkpoint, and not beyond
    assert math.isnan(after.so_far(WITH, 2).losses[1])
    assert {(step.own_ms, step.idle_ms) for step in found.steps} == {(1.0, 2.0)}
    assert found.peak_bytes == 101 and found.written == Written(10, None)
    # Of another checkpoint, or of another run's, nothing is known.
    for run, resume, first in (
        (tmp_path, tmp_path / "checkpoints", 1),
        (tmp_path / "own", tmp_path / "checkpoints", 2),
        (tmp_path, None, 2),
    ):
        (run / "checkpoints").mkdir(parents=True, exist_ok=True)
        other = beside(tiny, run, resume)
        other.begin(first, [WITH])
        assert other.so_far(WITH, first) == Tally(first=first)
        assert other.plan() is None
    # A newer checkpoint replaces the file; a damaged one is named.
    after.note(WITH, tally(2, 1.0))
    after.save(WITH, 3, None)
    after.saved(3)
    [path] = (tmp_path / "checkpoints/rank0").iterdir()
    assert path.name == "tally-3.json"
    path.write_text(path.read_text().replace("step_ms", "steps"))
    with pytest.raises(DamagedFileError, match=r"tally-3.json.*remove it"):
        beside(tiny, tmp_path, tmp_path / "checkpoints").begin(3, [WITH])


@pytest.mark.parametrize("others", [None, 1, 0])
def test_legs_of_other_steps_are_not_compared(
    tmp_path: Path, tiny: Make, others: int | None
) -> None:
    """The run before may have been `train.compare=false`: its steps are those of one
    leg."""
    before = beside(tiny, tmp_path)
    before.note(WITH, tally(0, 3.0, 2.0))
    if others is not None:
        before.note(WITHOUT, tally(others, *[3.0, 2.0][others:]))
    before.save(WITH, 2, None)
    after = beside(tiny, tmp_path, tmp_path / "checkpoints")
    after.begin(2, [WITHOUT, WITH])
    first = 0 if others == 0 else 2
    assert {after.so_far(leg, 2).first for leg in (WITHOUT, WITH)} == {first}
    alone = beside(tiny, tmp_path, tmp_path / "checkpoints")
    alone.begin(2, [WITH])
    assert alone.so_far(WITH, 2) == tally(0, 3.0, 2.0)


def test_ranks_of_other_steps_are_not_compared(tmp_path: Path, tiny: Make) -> None:
    """A rank that does not share the disk may have no figures."""
    before = beside(tiny, tmp_path)
    before.note(WITH, tally(0, 3.0, 2.0))
    before.save(WITH, 2, None)

    class Two(Ranks):
        def gather(self, value: Any) -> list[Any]:
            return [value, [None]]

    two = Two(**vars(RANKS))
    after = beside(tiny, tmp_path, tmp_path / "checkpoints", two)
    after.begin(2, [WITH])
    assert after.so_far(WITH, 2).first == 2


class Settled:
    """A session with a plan in force."""

    is_settled = True
    plan = Plan(orders={}, policy="search")
    profile = chain(2)


def test_a_plan_of_other_conditions_is_not_followed(
    tmp_path: Path, tiny: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled: Any = Settled()
    beside(tiny, tmp_path).save(WITH, 1, settled)
    resume = tmp_path / "checkpoints"
    found = beside(tiny, tmp_path, resume).plan()
    assert found == (Settled.plan, Settled.profile)
    others: tuple[dict[str, Any], ...] = (
        {"train": {"micro_batch_size": 3}},
        {"offload": {"target": "host", "max_overhead": 0.5}},
        {"model": {"num_layers": 3}},
    )
    for groups in others:
        assert beside(tiny, tmp_path, resume, **groups).plan() is None
    monkeypatch.setattr(platform, "node", lambda: "another")
    assert beside(tiny, tmp_path, resume).plan() is None
