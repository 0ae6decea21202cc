"""The compiled plan: rows act on what they were made for, and on nothing else."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ssdtrain
from ssdtrain.cache.tables import MOST_PLANS
from ssdtrain.errors import InPlaceError
from ssdtrain.plan.plan import Plan
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.cache.plans import all_moved, every_other_moved, nearly_all_kept
from tests.ssdtrain.cache.steps import Step, train

WIDTH, ROWS, NUM_BLOCKS = 32, 64, 3
SETTINGS: dict[str, Any] = {
    "max_overhead": 0.01,
    "target": "host",
    "min_bytes": 1,
    "recompute": "off",
}
MISMATCH = "unplanned: a micro-batch saved other tensors than the plan's"


class Block(nn.Module):
    """Saves parameters, views of them, small tensors and large ones."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Program(nn.Module):
    """A model whose forward is a whole step up to its loss."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.net = model()
        self.step = step

    def forward(self, number: int) -> Tensor:
        return self.step(self.net, number)


def call(net: nn.Module, number: int) -> Tensor:
    return net(number)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(NUM_BLOCKS)])


def batch(number: int, rows: int = ROWS) -> Tensor:
    torch.manual_seed(100 + number)
    return torch.randn(rows, WIDTH)


def plain_step(net: nn.Module, number: int) -> Tensor:
    return net(batch(number)).square().mean()


def never_gone(session: ssdtrain.Session) -> Plan:
    """`all_moved`, but backward is always faster than the release."""
    plan = all_moved(session)
    orders = {
        kind: tuple(replace(order, release_after=1000) for order in own)
        for kind, own in plan.orders.items()
    }
    return replace(plan, orders=orders)


def compare(
    step: Step,
    moved: bool = True,
    num_steps: int = 9,
    inside: bool = False,
    planned: Callable[[ssdtrain.Session], Plan] | None = None,
) -> ssdtrain.Session:
    """Every step is bitwise that of the same program without ssdtrain."""

    def program() -> nn.Module:
        return Program(step) if inside else model()

    run = call if inside else step
    expected = list(train(program(), run, num_steps))
    net = program()
    with ssdtrain.offload(net, **{**SETTINGS, "max_overhead": 0.0}) as session:
        for number, found in enumerate(train(net, run, num_steps)):
            for ours, theirs in zip(found, expected[number], strict=True):
                assert same_bits(ours, theirs), f"step {number}"
            if session.plan is not None and session.plan.policy != "all":
                made = planned or (all_moved if moved else nearly_all_kept)
                session.follow(made(session))
        assert session.cache.is_idle
        assert session.live_bytes == 0
        _ = session.steps
    return session


def test_another_view_of_a_part_of_a_storage_that_has_not_left() -> None:
    """The second half of a storage, and its transpose: the copy out is given up, and
    the bytes are still where they were, behind the first half's."""

    def step(net: nn.Module, number: int) -> Tensor:
        _, half = torch.unsafe_chunk(net(batch(number)), 2)
        return (half.t() @ half).tanh().mean()

    session = compare(step, inside=True, planned=never_gone)
    last = session.last_step
    assert last is not None and last.bytes_forwarded == last.bytes_offloaded > 0


@pytest.mark.parametrize("moved", [True, False])
def test_a_settled_step_is_served_by_rows(moved: bool) -> None:
    session = compare(plain_step, moved)
    last = session.last_step
    assert last is not None and not last.fallbacks
    assert last.bytes_kept + last.bytes_offloaded == last.bytes_saved > 0
    assert (last.bytes_offloaded > 0.9 * last.bytes_saved) == moved
    assert last.bytes_reloaded + last.bytes_forwarded == last.bytes_offloaded
    first = session.steps[0]
    assert (first.num_records, first.bytes_saved, first.bytes_parameters) == (
        last.num_records,
        last.bytes_saved,
        last.bytes_parameters,
    )


def all_moved_steps(net: nn.Module, session: Any, num_steps: int) -> Iterator[Any]:
    """Steps of which four have passed: under the plan, from here on under another."""
    steps = train(net, plain_step, num_steps)
    for _ in range(4):
        next(steps)
    session.follow(all_moved(session))
    return steps


def longer(net: nn.Module, number: int) -> Tensor:
    return net(batch(number, ROWS if number % 3 else 2 * ROWS)).square().mean()


def other_layout(net: nn.Module, number: int) -> Tensor:
    x = batch(number)
    if number % 2 and number > 5:  # as many bytes, other strides
        x = x.t().contiguous().t()
    return net(x).square().mean()


def one_more(net: nn.Module, number: int) -> Tensor:
    y = net(batch(number))
    return (y.sin() if number > 5 else y).square().mean()


def one_less(net: nn.Module, number: int) -> Tensor:
    x = batch(number)
    if number > 5:
        x = net[0].down(torch.tanh(net[0].up(x)))  # type: ignore[index]
    return net(x).square().mean()


def aliases(net: nn.Module, number: int) -> Tensor:
    """Two saved views share bytes in one step and do not in the next."""
    y = net(batch(number))
    z = y if number % 2 else y * 2
    return y.view(-1).square().mean() + z.view(-1).sin().mean()


def swapped_weights(net: nn.Module, number: int) -> Tensor:
    first, second = net[0].up, net[1].up  # type: ignore[index]
    x = batch(number)
    weight = second.weight if number > 5 else first.weight
    return F.linear(net(x), weight).square().mean()


def changed_twice(net: nn.Module, number: int) -> Tensor:
    y = net(batch(number))
    z = y * y
    with torch.no_grad():
        other = torch.zeros_like(y)
        other.add_(1)
    return (z.square() * other).mean()


def penalized(net: nn.Module, number: int) -> Tensor:
    x = batch(number).requires_grad_()
    y = net(x).square().mean()
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    return y + g.square().sum()


class Bias(nn.Module):
    """Multiplies by a tensor in its first steps, by a weight of that size later."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.number = 0

    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        for turn in range(4):  # the first and the last use have something to do
            is_weight = self.number > 6 and turn in (1, 2)
            x = x * (self.weight if is_weight else self.weight * 1.0)
        return x


@pytest.mark.parametrize("view", [False, True])
def test_a_weight_in_the_row_of_a_tensor_stays_a_weight(view: bool) -> None:
    """ZeRO-3 gives a weight other data before backward: no alias of the old ones."""

    def gradients(offloaded: bool) -> list[Tensor]:
        torch.manual_seed(0)
        net, found = Bias(), []
        if view:
            inner = net.forward
            net.forward = lambda x: inner(x).view(-1)  # type: ignore[method-assign]
        session = None
        if offloaded:
            session = ssdtrain.offload(net, **{**SETTINGS, "max_overhead": 0.0})
        for number in range(9):
            x = batch(number).requires_grad_()
            y = net(x)
            with torch.no_grad():
                net.weight.data = net.weight.data * 1.25
            y.square().sum().backward()
            found.append(x.grad.clone())
            with torch.no_grad():
                net.weight.add_(0)  # the end of a step
            if session is not None and session.plan is not None and number < 5:
                session.follow(nearly_all_kept(session))
        if session is not None:
            session.close()
        return found

    for ours, theirs in zip(gradients(True), gradients(False), strict=True):
        assert same_bits(ours, theirs)


INSIDE = [
    longer,
    other_layout,
    one_more,
    one_less,
    aliases,
    swapped_weights,
    changed_twice,
    penalized,
]


@pytest.mark.parametrize("step", INSIDE)
@pytest.mark.parametrize("moved", [True, False])
def test_forwards_that_change_under_a_table(step: Step, moved: bool) -> None:
    compare(step, moved, num_steps=12, inside=True)


@pytest.mark.parametrize("num_parts", [2, 8])
@pytest.mark.parametrize("moved", [True, False])
def test_slices_of_a_batch_stay_in_their_table(num_parts: int, moved: bool) -> None:
    """Micro-batches, as torch.distributed.pipelining cuts them."""

    def sliced(net: nn.Module, number: int) -> Tensor:
        *parts, last = batch(number, num_parts * ROWS).chunk(num_parts)
        for part in parts:
            net(part).square().mean().backward()
        return net(last).square().mean()

    last = compare(sliced, moved).last_step
    assert last is not None and not last.fallbacks
    assert (last.bytes_offloaded > 0.9 * last.bytes_saved) == moved


def test_a_lane_that_leaves_its_table_is_counted() -> None:
    session = compare(one_more, inside=True)
    counts = [report.fallbacks.get(MISMATCH, 0) for report in session.steps]
    assert not any(counts[3:6]) and all(counts[6:]), counts


@pytest.mark.parametrize("moved", [True, False])
def test_a_saved_tensor_that_was_changed_raises(moved: bool) -> None:
    def changed(net: nn.Module, number: int) -> Tensor:
        x = batch(number)
        y = net(x)
        z = y.square()
        if number == 8:
            with torch.no_grad():
                y.add_(1)
        return z.mean()

    net = Program(changed)
    with ssdtrain.offload(net, **{**SETTINGS, "max_overhead": 0.0}) as session:
        steps = train(net, call, 9)
        for number in range(8):
            next(steps)
            if number == 4:
                plan = (all_moved if moved else nearly_all_kept)(session)
                session.follow(plan)
        with pytest.raises(InPlaceError, match="modified by an inplace operation"):
            next(steps)


@pytest.mark.parametrize("name", ["norm", "up"])
def test_a_changed_weight_raises(name: str) -> None:
    """Itself in a norm, a view of it in a linear."""
    net = model()
    with ssdtrain.offload(net, **{**SETTINGS, "max_overhead": 0.0}) as session:
        for number, _ in enumerate(train(net, plain_step, 8)):
            if number == 4:
                session.follow(nearly_all_kept(session))
        loss = plain_step(net, 7)
        with torch.no_grad():
            getattr(net[1], name).weight.mul_(2)  # type: ignore[index]
        with pytest.raises(InPlaceError, match="a parameter"):
            loss.backward()


def test_places_are_used_again_and_given_back() -> None:
    net = model()
    with ssdtrain.offload(net, **{**SETTINGS, "max_overhead": 0.0}) as session:
        steps = all_moved_steps(net, session, 20)
        for _ in range(4):
            next(steps)
        pool = session.cache.offloader.pool
        before = pool.total_bytes, pool.used_bytes
        for _ in range(6):
            next(steps)
        assert (pool.total_bytes, pool.used_bytes) == before
        assert session.cache.is_idle
        session.follow(all_moved(session))
        next(steps)
        assert session.cache.is_idle and pool.used_bytes == 0


def test_plans_that_take_turns_keep_their_tables() -> None:
    """[Note: tables of other plans]: with all bits, and no buffer that is nobody's."""
    expected = list(train(model(), plain_step, num_steps := 16))
    plans: list[Plan] = []
    num_made: list[int] = []
    used: list[tuple[int, int]] = []
    with ssdtrain.offload(net := model(), **SETTINGS) as session:
        tables, pool = session.cache.tables, session.cache.offloader.pool
        for number, found in enumerate(train(net, plain_step, num_steps)):
            assert all(map(same_bits, found, expected[number]))
            if session.plan is not None and not plans:
                first, second = all_moved(session), every_other_moved(session)
                plans = [first, second, replace(first, prediction=None)]
            if plans:
                if len(num_made) % 3 == 2:  # a step that follows its table
                    used.append((sum(tables.place_sizes), pool.used_bytes))
                num_made.append(tables.num_made)
                session.follow(plans[len(num_made) // 3 % len(plans)])
        assert session.cache.is_idle and session.live_bytes == 0
    assert len(num_made) > 9 and len(set(num_made[5:])) == 1  # both have theirs
    assert used[0] == used[2] == used[3] > used[1] > (0, 0)
    assert pool.used_bytes == 0


def test_no_more_tables_stay_than_those_of_a_few_plans() -> None:
    with ssdtrain.offload(net := model(), **SETTINGS) as session:
        plans: list[Plan] = []
        made = []
        for _ in train(net, plain_step, 4 * (MOST_PLANS + 2) + 6):
            if session.plan is not None:
                if not plans:
                    plans = [all_moved(session) for _ in range(MOST_PLANS + 1)]
                made.append(session.cache.tables.num_made)
                session.follow(plans[len(made) // 3 % len(plans)])
    assert made[-1] - made[0] > MOST_PLANS + 1  # the first one was forgotten
