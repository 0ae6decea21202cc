"""What is simulated once is what would be simulated again."""

import random

import pytest

from ssdtrain.plan import outcomes
from ssdtrain.plan.baselines import fixed_policies
from ssdtrain.plan.choose import options
from ssdtrain.plan.outcomes import Outcomes
from ssdtrain.plan.schedule import schedule
from ssdtrain.plan.simulate import Outcome, Simulation
from ssdtrain.plan.timeline import Timeline
from tests.ssdtrain.plan import profiles as made
from tests.ssdtrain.plan.enumerated import styles


def figures(outcome: Outcome) -> tuple[object, ...]:
    return (
        outcome.step_ms,
        outcome.peak_bytes,
        outcome.peak_mark,
        outcome.waits,
        outcome.moved_bytes,
        outcome.host_peak_bytes,
    )


def test_each_candidate_once(monkeypatch: pytest.MonkeyPatch) -> None:
    num_runs = 0

    class Counted(Simulation):
        def run(self, detailed: bool = False) -> Outcome:
            nonlocal num_runs
            num_runs += 1
            return super().run(detailed)

    monkeypatch.setattr(outcomes, "Simulation", Counted)
    profile = made.drawn(1, 24)
    line, known = Timeline(profile), Outcomes(Timeline(profile))
    draw = random.Random(0)
    cases = [policy.placements for policy in fixed_policies(line)]
    for _ in range(8):
        cases.append(
            {
                kind: [draw.choice(options(line, item)) for item in items]
                for kind, items in profile.kinds.items()
            }
        )
    asked = [(case, style) for case in cases for style in styles(line)]
    for case, style in asked * 2:
        fresh = Timeline(profile)
        own = Simulation(fresh, schedule(fresh, case, style)).run()
        assert figures(known.of(case, style)) == figures(own)
    candidates = {known.placed(case, style) for case, style in asked}
    assert num_runs == len(candidates)
