"""Layers in which the plan does nothing run without hooks: [Note: quiet calls]."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import ssdtrain
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.cache.plans import every_other_moved, moved_in_front
from tests.ssdtrain.cache.steps import train
from tests.ssdtrain.transfer.test_interrupts import interrupted

WIDTH, ROWS, NUM_LAYERS = 32, 64, 5
NUM_MOVED = 3
"""Of the first layer's items: they have been released before the second begins."""
NUM_SAVED = 10
"""Tensors that autograd saves in a layer."""
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


def in_a_row(net: Model, x: Tensor) -> Tensor:
    for layer in net.layers:
        x = layer(x)
    return net.head(x).square().mean()  # type: ignore[no-any-return]


def step(net: nn.Module, number: int) -> Tensor:
    torch.manual_seed(100 + number)
    return net(torch.randn(ROWS, WIDTH))  # type: ignore[no-any-return]


def hooked(net: Model) -> list[list[bool]]:
    """Of each layer, and forgotten then."""
    found = [list(layer.hooked) for layer in net.layers]  # type: ignore[arg-type]
    for layer in net.layers:
        layer.hooked.clear()  # type: ignore[operator, union-attr]
    return found


def compare(
    run: Callable[[Model, Tensor], Tensor],
    plan: Callable[[ssdtrain.Session], Any] = lambda s: moved_in_front(s, NUM_MOVED),
    one: Callable[[nn.Module, int], Tensor] = step,
    **settings: Any,
) -> tuple[ssdtrain.Session, list[list[bool]]]:
    """Nine steps, bitwise those without ssdtrain; what the last one's layers saw."""
    expected = list(train(Model(run), one, 9))
    net = Model(run)
    with ssdtrain.offload(net, **{**SETTINGS, **settings}) as session:
        for number, found in enumerate(train(net, one, 9)):
            for ours, theirs in zip(found, expected[number], strict=True):
                assert same_bits(ours, theirs), f"step {number}"
            if number == 3:
                session.follow(plan(session))
            last = hooked(net)
        assert session.cache.is_idle and session.live_bytes == 0
        assert not our_hooks_are_on()
        _ = session.steps
    return session, last


def test_layers_behind_the_last_that_acts_see_no_hooks() -> None:
    session, last = compare(in_a_row)
    assert last == [[True], *[[False]] * (NUM_LAYERS - 1)]
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
    _, last = compare(in_a_row, every_other_moved)
    assert last == [[True]] * NUM_LAYERS


def with_a_call_more(net: Model, x: Tensor) -> Tensor:
    for layer in (*net.layers, net.layers[-1], net.layers[1]):
        x = layer(x)
    return net.head(x).square().mean()  # type: ignore[no-any-return]


def test_a_layer_that_is_called_again() -> None:
    _, last = compare(with_a_call_more)
    assert [len(calls) for calls in last] == [1, 2, 1, 1, 2]
    assert sum(map(sum, last)) == 1


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
    def attached(net: Model) -> Model:
        net.layers[1] = Nested()
        return net

    torch.manual_seed(1)
    expected = list(train(attached(Model(in_a_row)), step, 9))
    torch.manual_seed(1)
    net = attached(Model(in_a_row))
    with ssdtrain.offload(net, **SETTINGS, regions=["layers.*"]) as session:
        for number, found in enumerate(train(net, step, 9)):
            for ours, theirs in zip(found, expected[number], strict=True):
                assert same_bits(ours, theirs), f"step {number}"
            if number == 3:
                session.follow(moved_in_front(session, NUM_MOVED))
            last = hooked(net)
    assert last == [[True], [False] * 3, [False], [False], [False]]


def longer(net: nn.Module, number: int) -> Tensor:
    torch.manual_seed(100 + number)
    return net(torch.randn(ROWS + 8 * number, WIDTH))  # type: ignore[no-any-return]


def test_tensors_of_another_size_are_counted_one_by_one() -> None:
    session, last = compare(in_a_row, one=longer)
    assert last == [[True]] * NUM_LAYERS
    report = session.last_step
    assert report is not None and report.num_resized > 4 * NUM_LAYERS


def test_other_hooks_on_top_stay_there() -> None:
    """A user's scope around some layers, and inside of one: both see their tensors."""
    seen: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor.nbytes)
        return tensor

    def run(net: Model, x: Tensor) -> Tensor:
        first, second, *others = net.layers
        x = first(x)
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            x = second(x)
        for layer in others:
            x = layer(x)
        return net.head(x).square().mean()  # type: ignore[no-any-return]

    _, last = compare(run)
    assert last == [[True], [True], *[[False]] * (NUM_LAYERS - 2)]
    assert len(seen) == 2 * 9 * NUM_SAVED


def test_hooks_around_the_model_are_there_afterwards() -> None:
    """The user's own, below ours: a quiet layer is saved under theirs."""
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

    expected = list(train(Model(in_a_row), step, 9))
    net = Model(in_a_row)
    with ssdtrain.offload(net, **SETTINGS) as session:
        for number, found in enumerate(train(net, outer, 9)):
            for ours, theirs in zip(found, expected[number], strict=True):
                assert same_bits(ours, theirs), f"step {number}"
            if number == 3:
                session.follow(moved_in_front(session, NUM_MOVED))
    assert seen and not our_hooks_are_on()


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

    def run(net: Model, x: Tensor) -> Tensor:
        for layer in net.layers:
            on = our_hooks_are_on()
            try:
                x = layer(x)
            except ValueError:
                x = x + layer.up(x)[:, :WIDTH] + layer.down(layer.up(layer.norm(x)))
            assert our_hooks_are_on() == on
        return net.head(x).square().mean()  # type: ignore[no-any-return]

    def broken(net: nn.Module, number: int) -> Tensor:
        net.layers[2].is_broken = number == 7  # type: ignore[union-attr, index]
        return step(net, number)

    def model() -> Model:
        net = Model(run)
        torch.manual_seed(1)
        net.layers[2] = Broken()
        return net

    expected = list(train(model(), broken, 10))
    net = model()
    with ssdtrain.offload(net, **SETTINGS, regions=["layers.*"]) as session:
        for number, found in enumerate(train(net, broken, 10)):
            for ours, theirs in zip(found, expected[number], strict=True):
                assert same_bits(ours, theirs), f"step {number}"
            if number == 3:
                session.follow(moved_in_front(session, NUM_MOVED))
            last = hooked(net)
        assert session.cache.is_idle and session.live_bytes == 0
    assert last == [[True], *[[False]] * (NUM_LAYERS - 1)]
    assert not our_hooks_are_on()


def test_an_interrupt_around_a_quiet_layer_leaves_no_hooks() -> None:
    """Before each line; nothing of ours takes off another's."""
    outer = saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor)
    net, places = Model(in_a_row), []
    expected = list(train(Model(in_a_row), step, 60))
    steps = train(net, step, 60)
    with ssdtrain.offload(net, **SETTINGS) as session:
        for number in range(6):
            next(steps)
            if number == 3:
                session.follow(moved_in_front(session, NUM_MOVED))
        for at in range(1, 40):
            with interrupted(at, lambda name: name.endswith("cache/quiet.py")) as place:
                with outer:
                    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
                    try:
                        step(net, at)
                    except KeyboardInterrupt:
                        places += place
                    still = torch._C._autograd._top_saved_tensors_default_hooks(True)
            assert still == top and not our_hooks_are_on(), places[-1]
            if not place:
                break
        number = 6
        for found in steps:
            for ours, theirs in zip(found, expected[number], strict=True):
                assert same_bits(ours, theirs), f"step {number}"
            number += 1
            if number == 10:
                break
    names = {place.partition(":")[0] for place in places}
    assert names >= {"__enter__", "take_off", "__exit__", "put_back"}
