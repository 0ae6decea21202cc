"""A session that goes on with the plan of an earlier run."""

import pytest

import ssdtrain
from tests.ssdtrain.observe.test_planner import SETTINGS, Net, equal, train

pytestmark = pytest.mark.usefixtures("virtual_time")


def test_an_earlier_runs_plan_is_followed_from_the_first_step() -> None:
    """With its profile; and steps of another size are observed and planned for."""
    _, _, (plan, profile) = train(SETTINGS)
    settled: list[bool] = []

    def goes_on(step: int, session: ssdtrain.Session) -> None:
        if step == 0:
            session.follow(plan, profile)
        settled.append(session.is_settled)

    theirs, _, _ = train(None)
    ours, reports, (followed, _) = train(SETTINGS, hook=goes_on)
    assert equal(ours, theirs)
    assert followed.orders == plan.orders
    assert settled[1:] == [True] * 4
    predicted = plan.prediction.peak_bytes
    assert [report.saved_peak_bytes for report in reports] == [predicted] * 5

    class Deeper(Net):
        def __init__(self) -> None:
            super().__init__(4)

    theirs, _, _ = train(None, build=Deeper, num_steps=8)
    ours, reports, (other, _) = train(SETTINGS, build=Deeper, hook=goes_on, num_steps=8)
    assert equal(ours, theirs)
    assert len(other.orders["model/0"]) > len(plan.orders["model/0"])
    assert reports[-1].saved_peak_bytes == other.prediction.peak_bytes
