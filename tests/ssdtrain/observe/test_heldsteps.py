"""Steps whose device is held: what they find, how long they wait, what they leave."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import ssdtrain
from ssdtrain.cache.quiet import WithoutHooks
from ssdtrain.cache.regions import Choice
from ssdtrain.jsonfile import decode, in_parts, joined
from ssdtrain.observe.heldparts import MOST_OF_STEP, MOST_PARTS
from ssdtrain.observe.heldsteps import NUM_EMPTY
from ssdtrain.observe.measured import Measured
from ssdtrain.observe.memorygoal import MemoryGoal
from ssdtrain.observe.observer import HOLD_MS, RERUN_HOLD_MS
from ssdtrain.observe.paced import Paced
from ssdtrain.observe.samples import NUM_REGIONS, NUM_SAMPLES
from ssdtrain.plan import search
from ssdtrain.plan.calibrate import Pace, rebuild_key
from ssdtrain.plan.search import PART, Answer, Request
from ssdtrain.transfer.device import CpuDevice
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.observe.test_paced import Net, paces, train

__all__ = ["paces"]
pytestmark = pytest.mark.usefixtures("virtual_time")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """What is asked of searches."""
    found: list[Request] = []

    def answers(request: Request) -> Iterator[Answer]:
        found.append(request)
        return search.answers(request)

    monkeypatch.setattr("ssdtrain.observe.searching.answers", answers)
    return found


def test_held_steps_take_the_devices_own_time(
    paces: list[Pace | None],
    asked: list[Request],
    monkeypatch: pytest.MonkeyPatch,
    virtual_time: Any,
) -> None:
    """The device waits once at each moment, a second here, and none of it is counted;
    and in one more step at some rebuilds. No step is asked to wait for long."""
    holds: defaultdict[Any, list[float]] = defaultdict(list)
    """By what the step runs without hooks; None: with them."""

    def hold(self: CpuDevice, ms: float) -> None:
        if ms not in (HOLD_MS, RERUN_HOLD_MS):  # the observed step's
            holds[session.cache.bypass].append(ms)
        virtual_time.sleep(1.0)

    monkeypatch.setattr(CpuDevice, "hold", hold)
    monkeypatch.setattr(Measured, "may_hold", lambda *_, **__: True)
    net = Net()
    net.pause = lambda: virtual_time.sleep(0.002)
    theirs = train(Net(), 12)
    with ssdtrain.offload(net, target="host", min_bytes=1) as session:
        assert same_bits(train(net, 12), theirs)
        assert session.plan is not None
        profile = session.profile
    eager, *parts = paces
    assert eager is not None and profile is not None
    assert 1 < len(parts) <= MOST_PARTS
    assert sum(len(own) for by, own in holds.items() if by) == len(eager.segments)
    plain_ms, *_ = asked[-1].corrections.plain
    assert all(sum(own) < (MOST_OF_STEP - 1) * plain_ms for own in holds.values())
    held = asked[-1].corrections.held_pace
    assert held is not None and len(held.segments) == len(eager.segments)
    for one, after in zip(held.segments, eager.segments, strict=True):
        assert one.start == after.start
        assert one.ms < 1.5 * after.ms + 1.0 and one.host_ms < 1000.0
    (items,) = profile.kinds.values()
    made = [item for item in items if item.recipe is not None]
    rebuilds = holds[None][:-NUM_EMPTY]
    alike = Counter(rebuild_key(item.recipe, item.num_bytes) for item in made)
    assert len(rebuilds) == sum(min(num, NUM_SAMPLES) for num in alike.values())
    assert len(rebuilds) < len(made)
    longest_ms = max(item.recipe_ms for item in made)
    assert all(ms > longest_ms for ms in rebuilds)
    own = asked[-1].corrections.rebuild_ms
    assert set(own) == set(alike)
    # Here a rebuild takes as long as nothing between two moments, which is taken off.
    assert max(own.values()) == pytest.approx(0.0, abs=1e-9)
    text = "\n".join(in_parts(asked[-1], PART))
    assert decode(Request, joined(text.splitlines())) == asked[-1]


@pytest.mark.parametrize("choice", [Choice.NONE, Choice.ALL])
def test_rebuilds_are_those_of_a_few_layers(
    asked: list[Request],
    monkeypatch: pytest.MonkeyPatch,
    virtual_time: Any,
    choice: Choice,
) -> None:
    """All others run without hooks, where it is known whose tensors are which."""
    monkeypatch.setattr(MemoryGoal, "fits_plain", lambda self, profile: True)
    monkeypatch.setattr(Measured, "may_hold", lambda *_, **__: True)
    monkeypatch.setattr("ssdtrain.api._first_regions", lambda *settings: choice)
    alone: list[bool] = []
    """Of calls of layers without hooks: whether in a step of rebuilds."""
    take_off = WithoutHooks.__enter__

    def counted(self: WithoutHooks) -> None:
        alone.append(session.cache.ledger.clock.before_rebuild is not None)
        take_off(self)

    monkeypatch.setattr(WithoutHooks, "__enter__", counted)
    net = Net()
    net.pause = lambda: virtual_time.sleep(0.1)
    theirs = train(Net(), 14)
    with ssdtrain.offload(net, target="host", min_bytes=1) as session:
        assert same_bits(train(net, 14), theirs)
    num_alone = len(net.parts) - NUM_REGIONS if choice is Choice.ALL else 0
    assert sum(alone) == num_alone
    assert asked[-1].corrections.rebuild_ms


@pytest.mark.parametrize("another", [0, 1])
def test_a_part_of_another_program_leaves_nothing_half_told(
    paces: list[Pace | None],
    asked: list[Request],
    monkeypatch: pytest.MonkeyPatch,
    virtual_time: Any,
    another: int,
) -> None:
    """Whichever it is; what was told before is not believed, and no other follows."""
    monkeypatch.setattr(Measured, "may_hold", lambda *_, **__: True)

    class Shorter(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            bypass = session.cache.bypass
            if isinstance(bypass, Paced) and bypass.holds_ms:
                if len(paces) == 1 + another:
                    return self.parts[0](x).sum()  # type: ignore[no-any-return]
            return super().forward(x)

    net = Shorter()
    net.pause = lambda: virtual_time.sleep(0.002)
    settings: dict[str, Any] = {"target": "host", "min_bytes": 1, "recompute": "off"}
    with ssdtrain.offload(net, **settings) as session:
        train(net, 10)
    corrections = asked[-1].corrections
    first, *parts = paces
    assert first is not None and len(parts) == 1 + another
    assert parts[-1] is None and corrections.held_pace is None
    assert corrections.pace is first
