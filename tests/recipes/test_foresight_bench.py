"""What the foresight benchmarks compute from recorded numbers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recipes.bench.foresight import subjects
from recipes.bench.foresight.assemble import fabric_of
from recipes.bench.foresight.collect import cells
from recipes.bench.foresight.collectives import sizes
from recipes.bench.foresight.errors import PREDICTIONS, errors_by_model
from recipes.bench.foresight.evaluate import Host, cells_of, of_the_host, phases_us
from recipes.bench.foresight.held_ranks import summary_of
from recipes.bench.foresight.host_left_out import left_out
from recipes.bench.foresight.plans import (
    errors,
    kendall_tau,
    of_a_perfect_prediction,
    of_plans_told_apart,
    of_the_plain_step,
    over_the_plain_step,
)
from recipes.bench.foresight.subjects import Subject, TrainingStep
from recipes.bench.foresight.tables import last, runs
from recipes.bench.harness import timing
from ssdtrain.tools.foresight.capture import capture
from ssdtrain.tools.foresight.collectives import Collective, load_fabric
from ssdtrain.tools.foresight.device import load_device
from ssdtrain.tools.foresight.overheads import Phase
from ssdtrain.tools.foresight.power import Settled
from ssdtrain.tools.foresight.price import estimate_step
from tests.ssdtrain.virtual_time import VirtualTime


def test_a_step_is_judged_by_the_others_of_its_run() -> None:
    rows = [
        {"measured_us": 2.0 * us, "host_us": us, "model": str(us)}
        for us in (10.0, 20.0, 30.0)
    ]
    odd = {"measured_us": 500.0, "host_us": 100.0, "model": "odd"}
    found = {row["model"]: row["predicted_us"] for row in left_out([*rows, odd])}
    assert found == {"10.0": 20.0, "20.0": 40.0, "30.0": 60.0, "odd": 200.0}


def test_recorded_steps_are_priced_again() -> None:
    row = {"model": "bert", "batch": 3, "measured_us": 7.0, "measured_clock": {}}
    [cell] = cells_of({"cells": {"bert/3": row}}, "held2")
    assert (cell["step_us"], cell["shape"]["layers"]) == (7.0, 18)
    fresh = {"model": "bert", "batch": 3, "step_us": 7.0}
    kinds = [{**fresh, "kind": kind} for kind in ("held", "held2")]
    assert cells_of({"cells": dict(enumerate(kinds))}, "held2") == kinds[1:]


def step(model: str, batch: int, off_by: float) -> dict[str, Any]:
    return {
        **{"model": model, "batch": batch, "measured_us": 1000.0},
        **{"predicted_us": 1000.0 * (1 + off_by), "kernels_us": 500.0},
        **{"constant_us": 3000.0, "peak_bytes": 100, "predicted_peak_bytes": 101},
    }


def test_errors_are_told_by_model_and_written_for_every_run() -> None:
    rows = [step("bert", 1, 0.5), step("bert", 2, -0.02), step("gpt", 1, 0.04)]
    found = errors_by_model(rows)
    assert found["bert"]["predicted_us"]["worst"] == 0.5
    assert found["bert"]["predicted_us"]["mean"] == 0.26
    assert found["gpt"]["predicted_us"]["worst"] == 0.04
    assert found["gpt"]["peaks"]["worst"] == 0.01
    three = {"gmae": 0.01, "mean": 0.02, "worst": 0.5}
    run = {
        "environment": {"device": "a device"},
        "settings": {"shapes": "held3", "device_file": "calibrated"},
        "cells": {f"{row['model']}/{row['batch']}": row for row in rows},
        **dict.fromkeys((*PREDICTIONS, "peaks"), three),
    }
    explored = {**run, "settings": {"shapes": "explore", "device_file": "shipped"}}
    text = runs(run, explored)
    assert text.count("a minute's calibration") == 1
    assert "| a device, `held3` |" in text and "explore" not in text
    assert "| 1.0 % (2.0, 50.0) |" in text
    text = last(run, explored)
    assert "| bert | 1 | 1.0 ms | 1.500 | 0.500 | 3.000 | 1.010 |" in text


def test_a_trace_may_be_of_some_models() -> None:
    found = list(cells(["held3"], ["dlrm", "vit"]))
    assert {cell.model for cell in found} == {"dlrm", "vit"}
    assert len(found) == 6 < len(list(cells(["held3"]))) == 18


def test_plans_are_judged_by_their_order_and_by_the_plain_step_s_power() -> None:
    assert kendall_tau([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]) == 1.0
    assert kendall_tau([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == -1.0
    model = Settled()
    seen: list[dict[str, Any]] = [
        {"policy": name, "predicted_ms": ms, "recompute_ms": 0.0}
        | {"predicted_stall_ms": wait}
        for name, ms, wait in (("keep-all", 200.0, 0.0), ("other", 230.0, 30.0))
    ]
    for plan in seen:
        wait = plan["predicted_stall_ms"]
        plan["step_ms"] = model.step_ms(plan["predicted_ms"], 200.0, wait)
    assert errors(seen, None)[0] > 0.05
    unknown = Settled(full_watts=0.0)
    assert errors(seen, of_the_plain_step(unknown, seen)) == pytest.approx(
        [0.0, 0.0], abs=1e-9
    )


def test_noise_bounds_what_a_prediction_can_reach() -> None:
    """None: order is order. As much as the plans differ by: order is chance."""

    def seen(noise: float) -> list[dict[str, Any]]:
        return [
            {"step_ms": 100.0 + at, "keep_ms": 90.0 * (1.0 + noise * (at % 5 - 2))}
            for at in range(30)
        ]

    assert of_a_perfect_prediction(seen(0.0))["mean"] == 1.0
    some, much = (of_a_perfect_prediction(seen(n)) for n in (0.01, 0.5))
    assert 0.7 < some["of_twenty_the_least"] < some["mean"] < 0.95
    assert abs(much["mean"]) < 0.2


def test_plans_that_noise_does_not_tell_apart_stand_beside() -> None:
    """Three plans within the noise in the wrong order, one far off in the right."""
    steps = (100.0, 100.1, 100.2, 120.0)
    seen = [
        {"step_ms": step, "keep_ms": keep}
        for step, keep in zip(steps, (89.0, 90.0, 91.0, 90.0), strict=True)
    ]
    predicted = [103.0, 102.0, 101.0, 119.0]
    found = of_plans_told_apart(seen, predicted)
    assert (found["share_of_pairs"], found["tau"]) == (0.5, 1.0)
    assert kendall_tau(predicted, list(steps)) == 0.0
    assert found["differ_by"] == pytest.approx(1.96 * 2**0.5 * 0.5**0.5 / 90, abs=1e-4)
    # What drifts with the machine comes off: the first was measured on a fast one.
    assert over_the_plain_step(seen)[0] == 100.0 / 89.0
    wrong = of_plans_told_apart(seen, [103.0, 102.0, 101.0, 90.0])
    assert wrong["tau"] == -1.0


def test_collectives_are_judged_at_sizes_held_out_and_slow_kernels_as_before() -> None:
    """Two protocols: 5 us and 20 GB/s, or 15 us and 200 GB/s."""
    sizes = [4096 << step for step in range(16)]
    links = [
        {"kind": "all_reduce", "bytes": m, "us": min(5 + m / 2e4, 15 + m / 2e5)}
        for m in sizes
    ]
    fabric, errors = fabric_of({"ranks": 2, "links": links}, "nvlink")
    shipped = load_fabric("nvlink")
    changed = {k for k, own in fabric.curves.items() if own != shipped.curves[k]}
    assert changed == {Collective.ALL_REDUCE}
    assert fabric.curves[Collective.ALL_REDUCE].knots
    assert fabric.curves[Collective.SEND] == shipped.curves[Collective.SEND]
    [found] = errors.values()
    assert found["corners"] < found["sigmoid"] / 2 and found["corners"] < 0.01
    for m, row in zip(sizes, links, strict=True):
        us = fabric.microseconds(Collective.ALL_REDUCE, m, 2)
        assert us == pytest.approx(row["us"])
    assert fabric.compute_slowdown == shipped.compute_slowdown > 0.0
    assert found["corners"] <= found["corners, wide"] and "a round, mean" not in found
    kept = [{**row, "times_us": [0.9 * row["us"], 1.3 * row["us"]]} for row in links]
    _, errors = fabric_of({"ranks": 2, "links": kept}, "nvlink")
    assert errors["all_reduce"]["a round, mean"] == pytest.approx(0.2)


def test_sizes_of_collectives_have_one_between_any_two_powers() -> None:
    found = list(sizes(1 << 14))
    assert found == [4096, 6144, 8192, 12288, 16384]


def test_a_host_that_drifts_is_told_from_wrong_host_times() -> None:
    """What calibration's programs take more just before a step, it takes more; by
    phase, where only one of them does."""
    device = load_device("h100")
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(12)))
    graph = capture(model, lambda: model(torch.randn(2, 8)).sum(), optimizer="adamw")
    host = Host(steps_us=[100.0], phases_us=[{p.value: 50.0 for p in Phase}])
    calm = {phase.value: 50.0 for phase in Phase}

    def seen(step_us: float, host_us: dict[str, float]) -> dict[str, Any]:
        cell = {"programs": [{"step_us": step_us, "host_us": host_us}], "host_us": {}}
        return of_the_host(cell, graph, device, host)

    same, slow = seen(100.0, calm), seen(150.0, {**calm, "backward": 100.0})
    own = phases_us(graph, device)
    assert same["beside_us"] == pytest.approx(estimate_step(graph, device).step_us)
    assert same["beside_us"] == pytest.approx(same["beside_phases_us"])
    assert slow["host_drift"] == 1.5 and slow["host_drifts"]["backward"] == 2.0
    assert slow["beside_us"] == pytest.approx(1.5 * sum(own.values()), rel=0.02)
    more = slow["beside_phases_us"] - same["beside_us"]
    assert more == pytest.approx(own["backward"], rel=0.02)


def test_a_training_step_tells_its_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    model, clock = nn.Linear(4, 1), VirtualTime(tick_s=1e-3)
    for module in (subjects, timing):
        monkeypatch.setattr(module, "time", clock)
    slept: list[float] = []

    def forward() -> Tensor:
        clock.sleep(0.1)
        slept.append(0.1)
        return model(torch.ones(1, 4)).sum()

    step = TrainingStep(Subject(model, forward, "adamw"))
    before = model.weight.detach().clone()
    step()
    assert not torch.equal(model.weight, before)
    found = step.host_us(3)
    assert list(found) == ["forward", "backward", "update"] and len(slept) == 4
    assert found["forward"] > 100_000 > found["backward"] > 0.0 < found["update"]


def test_steps_over_ranks_are_summed_up_by_how_they_are_spread() -> None:
    rows = [
        {"how": how, "measured_us": 100.0, "predicted_us": us, "from_meta_us": more}
        for how, us, more in (
            ("ddp", 90.0, None),
            ("fsdp", 110.0, None),
            ("tp", None, 80.0),
            ("pipeline", 95.0, None),
        )
    ]
    found = summary_of(rows)
    assert found["data parallel"]["mean"] == 0.1
    assert found["pipeline"]["worst"] == 0.05
    assert found["tensor parallel, from the meta device"]["worst"] == 0.2
    assert "tensor parallel" not in found
