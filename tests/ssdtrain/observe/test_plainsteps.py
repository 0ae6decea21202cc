"""Of several steps without hooks, which one is believed."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import ssdtrain
from ssdtrain.cache.bypass import Bypass
from ssdtrain.observe.memorygoal import MemoryGoal
from ssdtrain.observe.plainsteps import MOST_ROUNDS, NUM_STEPS, PlainSteps
from ssdtrain.plan.calibrate import PlainTimes
from ssdtrain.rebuild.clock import Clock

CLOCK = Clock(torch.device("cpu"))
HOST_MS = 4.0


class Timer(Bypass):
    """Of a step that took so long."""

    host_forward_ms = HOST_MS

    def __init__(self, step_ms: float, asked: list[float]) -> None:
        self._step_ms = step_ms
        self._asked = asked

    def times(self, start: object, end: object) -> PlainTimes:
        """Half of the step is forward."""
        self._asked.append(self._step_ms)
        return PlainTimes(self._step_ms, self._step_ms / 2, HOST_MS, 1.0)


def believed(
    steps: Sequence[float], others: Sequence[float] = ()
) -> tuple[PlainTimes | None, int]:
    """What is believed of steps that took so many ms, those of another rank `others`;
    and how many steps that took."""
    plain = PlainSteps(CLOCK)
    asked: list[float] = []
    for number, step_ms in enumerate(steps, 1):
        plain.begin(None)
        plain.ended(Timer(step_ms, asked), None)
        if not plain.round_is_over:
            assert len(asked) % (NUM_STEPS - 1) == 0  # nobody asked in between
            continue
        found = plain.measured()
        if others:
            theirs = others[number - NUM_STEPS + 1 : number]
            found = [
                max(own, other)
                for own, other in zip(
                    found,
                    [each for ms in theirs for each in (ms, ms / 2, HOST_MS, -1.0)],
                    strict=True,
                )
            ]
        times = plain.believed(found)
        if times is not None:
            return times, number
    return None, len(steps)


@pytest.mark.parametrize(
    ("steps", "expected_ms", "number"),
    [
        ([900.0, 660.0, 661.0], 660.0, 3),
        ([1654.0, 866.2, 660.5, 669.3, 659.1, 661.2], 659.1, 6),
        ([900.0, 500.0, 600.0, 900.0, 300.0, 400.0, 900.0, 700.0, 800.0], 500.0, 9),
    ],
    ids=["alike", "slow ones first", "never alike"],
)
def test_a_step_counts_when_the_next_one_takes_as_long(
    steps: list[float], expected_ms: float, number: int
) -> None:
    """The second are two ranks', whose third step was one of the allocator's."""
    times, after = believed(steps)
    assert times == PlainTimes(expected_ms, expected_ms / 2, HOST_MS, 1.0)
    assert after == number <= NUM_STEPS * MOST_ROUNDS


def test_ranks_believe_the_same_step() -> None:
    """Each alone would have taken its own first round."""
    ours = [1.0, 700.0, 690.0, 1.0, 660.0, 661.0]
    theirs = [1.0, 800.0, 790.0, 1.0, 650.0, 655.0]
    assert believed(ours, theirs) == believed(theirs, ours)
    theirs[2] = 900.0
    assert believed(ours, theirs) == believed(theirs, ours)
    times, after = believed(ours, theirs)
    assert times is not None and (times.step_ms, after) == (660.0, 6)


@pytest.mark.usefixtures("virtual_time")
@pytest.mark.parametrize("slow", [(), (0,), (0, 1)])
def test_a_slow_second_plain_step_changes_nothing(
    slow: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, virtual_time: Any
) -> None:
    """The first plain steps take a second more; the profile's step is plain's."""
    monkeypatch.setattr(MemoryGoal, "fits_plain", lambda self, profile: True)
    found = [_plain_ms(each, virtual_time) for each in ((), slow)]
    assert found[1] == pytest.approx(found[0], rel=1e-3) and found[0] > 0


def _plain_ms(slow: tuple[int, ...], virtual_time: Any) -> float:
    torch.manual_seed(0)
    num_plain = 0
    parts = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
    model = nn.Sequential(*parts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def waits(*_: Any) -> None:
        nonlocal num_plain
        if isinstance(session.cache.bypass, Bypass):
            if num_plain in slow:
                virtual_time.sleep(1.0)
            num_plain += 1

    with ssdtrain.offload(
        model, max_overhead=0.01, target="host", min_bytes=1
    ) as session:
        model[0].register_forward_hook(waits)
        for _ in range(12):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert session.profile is not None
        return float(session.profile.notes["plain_step_ms"])
