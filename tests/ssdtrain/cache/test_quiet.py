"""Layers in which the plan does nothing run without hooks: [Note: quiet calls]."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import ssdtrain
from ssdtrain.cache.quiet import ForwardHooks
from ssdtrain.plan.plan import Plan
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.cache.plans import every_other_moved, moved_in_front
from tests.ssdtrain.cache.steps import train
from tests.ssdtrain.transfer.test_interrupts import interrupted

WIDTH, ROWS, NUM_LAYERS = 32, 64, 5
NUM_MOVED = 3
"""Of the first layer's items: they have been released before the second begins."""
NUM_SAVED = 10
"""Tensors that autograd saves in a layer."""
NUM_STEPS = 9
ALL_BUT_ONE = [[True], *[[False]] * (NUM_LAYERS - 1)]
"""Hooks are on in the first layer alone."""
NAMED = {"regions": ["layers.*"]}
"""For layers that are not alike."""
SETTINGS: dict[str, Any] = {"target": "host", "min_bytes": 1, "max_overhead": 0.0}


def our_hooks_are_on() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


class Layer(nn.Module):
    """Tells whether it ran under hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.hooked: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.hooked.append(our_hooks_are_on())
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Layers, called one after the other by `run`."""

    def __init__(self, run: Callable[["Model", Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def in_a_row(net: Any, x: Tensor) -> Tensor:
    for layer in net.layers:
        x = layer(x)
    return loss_of(net, x)


def loss_of(net: Any, x: Tensor) -> Tensor:
    loss: Tensor = net.head(x).square().mean()
    return loss


def stacked() -> Model:
    return Model(in_a_row)


def step(net: nn.Module, number: int, rows: int = ROWS) -> Tensor:
    torch.manual_seed(100 + number)
    loss: Tensor = net(torch.randn(rows, WIDTH))
    return loss


def hooked(net: Any) -> list[list[bool]]:
    """Of each layer, and forgotten then."""
    found = [list(layer.hooked) for layer in net.layers]
    for layer in net.layers:
        layer.hooked.clear()
    return found


def in_front(session: ssdtrain.Session) -> Plan:
    return moved_in_front(session, NUM_MOVED)


def compare(
    make: Callable[[], Model],
    plan: Callable[[ssdtrain.Session], Plan] = in_front,
    one: Callable[[nn.Module, int], Tensor] = step,
    **settings: Any,
) -> tuple[ssdtrain.Session, list[list[list[bool]]]]:
    """Steps, bitwise those without ssdtrain; what the layers saw in each."""
    expected, seen = list(train(make(), one, NUM_STEPS)), []
    net = make()
    with ssdtrain.offload(net, **SETTINGS, **settings) as session:
        for number, found in enumerate(train(net, one, NUM_STEPS)):
            for ours, theirs in zip(found, expected[number], strict=True):
                assert same_bits(ours, theirs), f"step {number}"
            if number == 3:
                session.follow(plan(session))
            seen.append(hooked(net))
            assert not our_hooks_are_on()
        assert session.cache.is_idle and session.live_bytes == 0
        _ = session.steps
    return session, seen


def test_layers_behind_the_last_that_acts_see_no_hooks() -> None:
    session, seen = compare(stacked)
    assert seen[-1] == ALL_BUT_ONE
    report, first = session.last_step, session.steps[0]
    assert report is not None and not report.fallbacks
    assert report.bytes_offloaded > 0
    # What was passed over is booked as if it had been packed.
    assert (report.num_records, report.bytes_saved, report.bytes_parameters) == (
        first.num_records,
        first.bytes_saved,
        first.bytes_parameters,
    )


def test_layers_that_act_keep_their_hooks() -> None:
    _, seen = compare(stacked, every_other_moved)
    assert seen[-1] == [[True]] * NUM_LAYERS


def test_a_layer_that_is_called_again() -> None:
    def run(net: Any, x: Tensor) -> Tensor:
        for layer in (*net.layers, net.layers[-1], net.layers[1]):
            x = layer(x)
        return loss_of(net, x)

    _, seen = compare(lambda: Model(run))
    assert [len(calls) for calls in seen[-1]] == [1, 2, 1, 1, 2]
    assert sum(map(sum, seen[-1])) == 1


class Nested(Layer):
    """Calls itself."""

    depth = 2

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.depth:
            self.depth -= 1
            try:
                x = self(x)
            finally:
                self.depth += 1
        return x


def test_calls_inside_of_a_quiet_call_are_counted() -> None:
    def make() -> Model:
        net = stacked()
        torch.manual_seed(1)
        net.layers[1] = Nested()
        return net

    _, seen = compare(make, **NAMED)
    assert seen[-1] == [[True], [False] * 3, [False], [False], [False]]


def test_tensors_of_another_size_are_counted_one_by_one() -> None:
    session, seen = compare(
        stacked, one=lambda net, number: step(net, number, ROWS + 8 * number)
    )
    assert seen[-1] == [[True]] * NUM_LAYERS
    report = session.last_step
    assert report is not None and report.num_resized > 4 * NUM_LAYERS


def test_other_hooks_on_top_stay_there() -> None:
    """A user's scope around some layers, and inside of one: both see their tensors."""
    seen: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor.nbytes)
        return tensor

    def run(net: Any, x: Tensor) -> Tensor:
        first, second, *others = net.layers
        x = first(x)
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            x = second(x)
        for layer in others:
            x = layer(x)
        return loss_of(net, x)

    _, on = compare(lambda: Model(run))
    assert on[-1] == [[True], [True], *[[False]] * (NUM_LAYERS - 2)]
    assert len(seen) == 2 * NUM_STEPS * NUM_SAVED


def test_hooks_around_the_model_see_nothing_under_a_plan() -> None:
    """The user's own, below ours: no layer is quiet, and they are there afterwards."""
    seen: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor.nbytes)
        return tensor

    def outer(net: nn.Module, number: int) -> Tensor:
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = step(net, number)
            top = torch._C._autograd._top_saved_tensors_default_hooks(True)
            assert top[0] is pack
            return loss

    def plan(session: ssdtrain.Session) -> Plan:
        seen.clear()  # steps before the plan may be without ours
        return in_front(session)

    compare(stacked, plan, outer)
    assert not seen


def test_a_checkpoint_around_the_model() -> None:
    """It hears of no tensor in forward, and asks for none in backward."""

    def one(net: nn.Module, number: int) -> Tensor:
        torch.manual_seed(100 + number)
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        loss: Tensor = checkpoint(net, x, use_reentrant=False)
        return loss

    session, _ = compare(stacked, one=one)
    report = session.last_step
    assert report is not None and report.bytes_offloaded > 0 and not report.fallbacks


def test_a_model_of_another_session_inside() -> None:
    """Its layers save nothing under the hooks of the outer model's session, also where
    its own plan does nothing."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = stacked()
            self.other = [stacked()]

        def forward(self, x: Tensor) -> Tensor:
            both: Tensor = self.own(x) + self.other[0](x)
            return both

    def steps(net: Outer) -> Iterator[list[Tensor]]:
        both = nn.ModuleList([net, *net.other])
        return train(both, lambda _, number: step(net, number), 12)

    expected = list(steps(Outer()))
    net = Outer()
    with (
        ssdtrain.offload(net, **SETTINGS) as session,
        ssdtrain.offload(net.other[0], **SETTINGS) as its_own,
    ):
        for number, found in enumerate(steps(net)):
            for ours, theirs in zip(found, expected[number], strict=True):
                assert same_bits(ours, theirs), f"step {number}"
            if number == 3:
                session.follow(in_front(session))
            if number == 6:
                its_own.follow(in_front(its_own))
        reports = [*session.steps[-4:], *its_own.steps[-4:]]
    assert not any(report.fallbacks for report in reports)
    assert all(report.bytes_offloaded for report in reports)


def noisy() -> saved_tensors_hooks:
    """Hooks that change what is saved: who does not see them gets other gradients."""
    return saved_tensors_hooks(lambda tensor: tensor * 1.125, lambda tensor: tensor)


class Opening(Layer):
    """Leaves hooks open."""

    hooks: saved_tensors_hooks

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.hooks.__enter__()
        return torch.tanh(x)


class Closing(Opening):
    """Closes them."""

    def forward(self, x: Tensor) -> Tensor:
        x = Layer.forward(self, x)
        self.hooks.__exit__()
        return torch.tanh(x)


@pytest.mark.parametrize(("opens_at", "closes_at"), [(1, 2), (1, 3), (2, None)])
def test_hooks_that_a_quiet_layer_leaves_open(
    opens_at: int, closes_at: int | None
) -> None:
    """They are above ours as long as they are open, if need be behind the forward."""
    hooks = noisy()

    def one(net: Any, number: int) -> Tensor:
        loss = step(net, number)
        if closes_at is None:
            loss = loss + torch.tanh(net.head.weight).sum()
            hooks.__exit__()
        return loss

    def make() -> Model:
        net = stacked()
        for at, kind in ((opens_at, Opening), (closes_at, Closing)):
            if at is not None:
                net.layers[at].__class__ = kind
                net.layers[at].hooks = hooks
        return net

    session, seen = compare(make, one=one, **NAMED)
    # Backward begins with what the last layer under our hooks has saved.
    assert seen[-1][0] == [True] and seen[-1][opens_at] == [closes_at is None]
    assert session.last_step is not None and not session.last_step.fallbacks


def test_hooks_opened_where_ours_are_off_stay_when_an_interrupt_ends_all() -> None:
    outer, ours = noisy(), ForwardHooks(torch.Tensor.detach, lambda tensor: tensor)
    ours.__enter__()
    ours.take_off()
    with outer:
        ours.__exit__()
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        assert top is not None and top[0] is outer.pack_hook
    assert not our_hooks_are_on()


def test_hooks_below_ours_that_are_closed_too_early() -> None:
    """That took ours: what is left is theirs, and goes in the place of it."""
    outer, ours = noisy(), ForwardHooks(torch.Tensor.detach, lambda tensor: tensor)
    outer.__enter__()
    with ours:
        assert not ours.are_alone
        outer.__exit__()
    assert not our_hooks_are_on()


class Scoped(Layer):
    """Saves some weights in a scope in which nothing moves."""

    def forward(self, x: Tensor) -> Tensor:
        with ssdtrain.no_offload():
            x = x + self.up(x)[:, :WIDTH]
        return super().forward(x)


def test_weights_saved_in_a_scope_of_a_quiet_layer_are_counted() -> None:
    def make() -> Model:
        net = stacked()
        for layer in net.layers:
            layer.__class__ = Scoped
        return net

    session, seen = compare(make, **NAMED)
    counts = [report.bytes_parameters for report in session.steps]
    assert seen[-1] == ALL_BUT_ONE
    assert len(set(counts[-5:])) == 1 and counts[-1] == counts[1]


def test_layers_that_are_given_tensors_of_another_size_keep_their_hooks() -> None:
    """Nothing before them has another size."""

    def run(net: Any, x: Tensor) -> Tensor:
        first, *others = net.layers
        x = first(x)
        y = x[: ROWS - 8 * (net.number == 7)]
        for at, layer in enumerate(others):
            y = layer(y) if at % 2 else layer(x=y)
        return loss_of(net, x) + y.square().mean()

    def one(net: Any, number: int) -> Tensor:
        net.number = number
        return step(net, number)

    session, seen = compare(lambda: Model(run), one=one)
    reports = session.steps
    assert seen[6] == seen[8] == ALL_BUT_ONE and seen[7] == [[True]] * NUM_LAYERS
    assert reports[-2].num_resized > 4 * (NUM_LAYERS - 1)
    assert reports[-2].bytes_saved < reports[-1].bytes_saved == reports[-3].bytes_saved


class Broken(Layer):
    """Raises when it is told to."""

    is_broken = False

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.is_broken:
            raise ValueError("broken")
        return x


def test_a_quiet_layer_that_raises() -> None:
    """Its caller goes on: everything behind it is served as before."""

    def run(net: Any, x: Tensor) -> Tensor:
        for layer in net.layers:
            on = our_hooks_are_on()
            try:
                x = layer(x)
            except ValueError:
                x = x + layer.up(x)[:, :WIDTH] + layer.down(layer.up(layer.norm(x)))
            assert our_hooks_are_on() == on
        return loss_of(net, x)

    def one(net: Any, number: int) -> Tensor:
        net.layers[2].is_broken = number == 7
        return step(net, number)

    def make() -> Model:
        net = Model(run)
        torch.manual_seed(1)
        net.layers[2] = Broken()
        return net

    _, seen = compare(make, one=one, **NAMED)
    assert seen[-1] == ALL_BUT_ONE


@pytest.mark.parametrize("inside", [False, True])
def test_an_interrupt_around_a_quiet_layer_leaves_no_hooks(inside: bool) -> None:
    """Before each line; nothing of ours takes off another's."""
    outer = saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor)
    net, places = stacked(), []
    expected = list(train(stacked(), step, 10))
    steps = train(net, step, 10)
    with ssdtrain.offload(net, **SETTINGS) as session:
        for number in range(6):
            next(steps)
            if number == 3:
                session.follow(in_front(session))
        for at in range(1, 400):
            with interrupted(at, lambda name: name.endswith("cache/quiet.py")) as place:
                with outer if inside else nullcontext():
                    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
                    try:
                        step(net, at)
                    except KeyboardInterrupt:
                        places += place
                    still = torch._C._autograd._top_saved_tensors_default_hooks(True)
            assert still == top and not our_hooks_are_on(), places[-1]
            if not place:
                break
        for number, found in enumerate(steps, start=6):
            for ours, theirs in zip(found, expected[number], strict=True):
                assert same_bits(ours, theirs), f"step {number}"
    names = {place.partition(":")[0] for place in places}
    assert names >= {"__enter__", "__exit__"}
    assert inside or names >= {"take_off", "put_back"}
