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
from ssdtrain.train.trainer import whole
from tests.ssdtrain.plan.profiles import chain
from tests.ssdtrain.train.legs import leg_result

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
    make: Make, run: Path, resume: Path | None = None, **groups: dict[str, Any]
) -> Beside:
    train = {**groups.pop("train", {}), **({"resume": str(resume)} if resume else {})}
    settings = make(train=train, **groups)
    settings = dataclasses.replace(settings, run_directory=str(run))
    unused: Any = None
    return Beside(Workload(settings, unused, unused, RANKS))


def test_figures_go_on_behind_a_checkpoint(tmp_path: Path, tiny: Make) -> None:
    before = beside(tiny, tmp_path)
    before.note(WITHOUT, tally(0, 3.0, 2.0, 1.0))
    before.note(WITH, tally(0, 3.0, math.nan))
    before.save(WITH, 2, None)
    before.saved(2)
    after = beside(tiny, tmp_path, tmp_path / "checkpoints")
    after.begin(2)
    earlier = after.earlier(WITHOUT)
    assert earlier == tally(0, 3.0, 2.0)  # up to the checkpoint, and not beyond
    assert math.isnan(after.earlier(WITH).losses[1])  # type: ignore[union-attr]
    joined = earlier.and_then(tally(2, 0.5))
    assert joined.first == 0 and joined.losses == (3.0, 2.0, 0.5)
    assert {(step.own_ms, step.idle_ms) for step in joined.steps} == {(1.0, 2.0)}
    assert joined.peak_bytes == 101 and joined.written == Written(20, None)
    # Of another checkpoint, or of another run's, nothing is known.
    for run, resume, first in (
        (tmp_path, tmp_path / "checkpoints", 1),
        (tmp_path / "own", tmp_path / "checkpoints", 2),
        (tmp_path, None, 2),
    ):
        (run / "checkpoints").mkdir(parents=True, exist_ok=True)
        other = beside(tiny, run, resume)
        other.begin(first)
        assert other.earlier(WITH) is None and other.plan() is None
    # A newer checkpoint replaces the file; a damaged one is named.
    after.note(WITH, tally(2, 1.0))
    after.save(WITH, 3, None)
    after.saved(3)
    [path] = (tmp_path / "checkpoints/rank0").iterdir()
    assert path.name == "tally-3.json"
    path.write_text(path.read_text().replace("step_ms", "steps"))
    with pytest.raises(DamagedFileError, match=r"tally-3.json.*remove it"):
        beside(tiny, tmp_path, tmp_path / "checkpoints").begin(3)


def test_legs_of_other_steps_are_not_compared() -> None:
    """The run before was `train.compare=false`: its steps are those of one leg."""
    own, before = tally(2, 1.0), tally(0, 3.0, 2.0)
    legs = {
        WITHOUT: [leg_result(WITHOUT, own)],
        WITH: [leg_result(WITH, own, earlier=before)],
    }
    assert [r.own for rs in whole(legs).values() for r in rs] == [own, own]
    legs[WITHOUT] = [leg_result(WITHOUT, own, earlier=tally(1, 2.0))]
    assert [r.own for rs in whole(legs).values() for r in rs] == [own, own]
    legs[WITHOUT] = [leg_result(WITHOUT, own, earlier=before)]
    joined = before.and_then(own)
    assert [r.own for rs in whole(legs).values() for r in rs] == [joined, joined]


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
