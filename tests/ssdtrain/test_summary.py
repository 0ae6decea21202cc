"""What a person reads of a session: three lines, a step, and the keywords."""

from dataclasses import fields, replace
from typing import Any

import pytest

import ssdtrain
from ssdtrain.config import AdvancedOptions, OffloadConfig
from ssdtrain.counters import StepReport
from ssdtrain.curves import Curve, Links
from ssdtrain.plan.choose import choose
from ssdtrain.plan.goal import Goal
from ssdtrain.plan.plan import Plan
from ssdtrain.plan.profile import Item, Mark, Phase, Profile
from ssdtrain.summary import (
    summary,
    why_it_stays,
)
from tests.ssdtrain.tiny_models import tanhs, train

LINK = Curve.straight(1e-6, 1e11)


def step(**values: Any) -> StepReport:
    whole: dict[str, Any] = {
        "step": 3,
        "num_records": 4,
        "bytes_saved": 4_000_000_000,
        "bytes_kept": 1_000_000_000,
        "bytes_offloaded": 3_000_000_000,
        "bytes_recomputed": 0,
        "bytes_forwarded": 0,
        "bytes_reloaded": 3_000_000_000,
        "bytes_written": 0,
        "bytes_parameters": 0,
        "stall_ms": 1.25,
        "waits_ms": {},
        "host_wait_module": "",
        "recompute_ms": 0.0,
        "saved_peak_bytes": 1_000_000_000,
        "saved_backward_start_bytes": 900_000_000,
        "allocated": None,
        "reserved": None,
        "plan_error": None,
        "fallbacks": {"kept: the storage was full": 2},
    }
    return StepReport(**{**whole, **values})


def planned(**notes: str) -> tuple[Profile, Plan]:
    """Four tensors of 1 GB, one of them held; a step of 400 ms."""
    items = tuple(Item(name=f"t{n}", num_bytes=10**9, held=n == 0) for n in range(4))
    order = [(Phase.FORWARD, n) for n in range(4)]
    order += [(Phase.BACKWARD, n) for n in reversed(range(4))]
    marks = tuple(Mark(lane=0, phase=phase, item=n, ms=50.0) for phase, n in order)
    profile = Profile(
        lanes=("model/0",),
        kinds={"model/0": items},
        marks=marks,
        links=Links(d2h=LINK, h2d=LINK),
        notes=notes,
    )
    return profile, choose(profile, Goal(memory_budget_bytes=25 * 10**8))


def test_memory_and_time_are_measured_or_not_told() -> None:
    profile, plan = planned(plain_step_ms="400")
    assert plan.prediction is not None
    longer = 500 / plan.prediction.step_ms - 1
    timed = [step(plan_error=longer)] * 3
    told = summary(timed, plan=plan, profile=profile, advice="go on.")
    assert told.splitlines() == [
        "Memory: at most 1.00 GB of saved tensors on the device instead of 4.00 GB: "
        "75 % less (measured).",
        "Time: 500.0 ms a step, 25.0 % slower than the step without ssdtrain (400.0 "
        "ms, measured here).",
        "Next: go on.",
    ]
    without = replace(profile, notes={})
    told = summary(timed, plan=plan, profile=without)
    assert "500.0 ms a step; not compared, as no plain step was timed." in told
    assert "Time: not compared" in summary([step()])
    assert "no step has been reported" in summary([])


def test_a_busy_machine_gets_no_ratio() -> None:
    profile, plan = planned(plain_step_ms="400")
    steps = [step(plan_error=error) for error in (0.0, 0.5, 0.1)]
    told = summary(steps, plan=plan, profile=profile)
    assert "too different for a ratio" in told and "%" not in told.splitlines()[1]


def test_unknown_micro_batches_give_no_share() -> None:
    """Four micro-batches save four times what is alive at once."""
    told = summary([step(saved_peak_bytes=10**9, bytes_saved=4 * 10**9)])
    assert "% less" not in told and "autograd saved 4.00 GB in the step" in told
    kept = step(bytes_offloaded=0, saved_peak_bytes=2 * 10**9)
    assert "instead of 2.00 GB: 50 % less" in summary([kept, step()])


def test_reasons_for_what_stays_by_size() -> None:
    profile, plan = planned()
    found = why_it_stays(profile, plan)
    held = "1.00 GB stay because your script or model holds them"
    assert any(text.startswith(held) for text in found)
    sizes = [float(text.split()[0]) for text in found]
    assert sizes == sorted(sizes, reverse=True)


def test_a_report_can_be_read() -> None:
    assert str(step()).splitlines() == [
        "step 3: autograd saved 4.00 GB in 4 tensors; at most 1.00 GB of them on the "
        "device at once",
        "  kept 1.00 GB, offloaded 3.00 GB (reloaded 3.00 GB), made again 0 B",
        "  compute waited 1.2 ms for copies, and spent 0.0 ms to make tensors again",
        "  kept: the storage was full (2 times)",
    ]
    assert "num_records=4" in repr(step())


@pytest.mark.parametrize("plan", ["auto", "offload-all", "keep-all"])
def test_a_session_tells_three_lines(plan: str) -> None:
    model = tanhs()
    with ssdtrain.offload(model, target="host", plan=plan, min_bytes=0) as session:
        assert session.summary().startswith("Memory: no step has been reported")
        train(model, model.parameters(), 12)
        told = session.summary().splitlines()
        assert session.explain().startswith("\n".join(told[:2]))
    assert [line.partition(":")[0] for line in told] == ["Memory", "Time", "Next"]
    assert all(line.endswith((".", "?")) for line in told), told


def test_help_explains_every_keyword() -> None:
    text = ssdtrain.offload.__doc__ or ""
    advanced = AdvancedOptions.__annotations__
    shown = [
        field.name for field in fields(OffloadConfig) if field.name not in advanced
    ]
    assert len(shown) == 11
    for name in (*shown, "advanced"):
        assert f"\n        {name}: " in text, name
