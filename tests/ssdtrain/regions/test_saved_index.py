"""Tensors of a region that is known to run again: told by their index alone."""

import functools
import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ssdtrain
from ssdtrain.cache import regioncall, savedindex
from ssdtrain.cache.cache import TensorCache
from ssdtrain.errors import InPlaceError, RegionError
from tests.ssdtrain.unseen import Owner

SETTINGS: dict[str, Any] = {"plan": "keep-all", "recompute": "regions", "min_bytes": 0}


class Block(nn.Module):
    """A layer; `act` is what its forward does besides."""

    def __init__(self, act: Any = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x))
        if self.act is not None:
            hidden = self.act(hidden)
        return x + self.down(hidden)


def net(act: Any = None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(act) for _ in range(3)), nn.Linear(8, 1))


def train(model: nn.Module, num_steps: int = 4) -> list[Tensor]:
    """Gradients of each step."""
    found = []
    for number in range(num_steps):
        torch.manual_seed(number)
        model(torch.randn(4, 8)).square().mean().backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
    return found


def settle(model: nn.Module) -> None:
    """Two steps: each region has been found clean."""
    train(model, 2)


def sparse(hidden: Tensor) -> Tensor:
    """Saves a sparse tensor."""
    lead = torch.eye(4).to_sparse()
    return torch.sparse.mm(lead, hidden) + hidden


def twice(hidden: Tensor) -> Tensor:
    """Saves views of one tensor, and one tensor several times."""
    left, right = hidden.chunk(2, -1)
    return (
        torch.cat([left * right, hidden[:, ::2] * hidden[:, 1::2]], -1) * hidden.exp()
    )


def statistics(hidden: Tensor) -> Tensor:
    """Saves integers and tensors without history."""
    order = hidden.argsort(-1)
    return hidden.gather(-1, order) * torch.arange(16.0)


@pytest.mark.parametrize("act", [None, sparse, twice, statistics, nn.Dropout(0.5)])
def test_gradients_are_bitwise_those_of_plain(act: Any) -> None:
    expected = train(net(act), 5)
    model = net(act)
    with ssdtrain.offload(model, **SETTINGS) as session:
        found = train(model, 5)
        assert session.last_step is not None
        assert session.last_step.bytes_recomputed > 0
    assert all(map(torch.equal, found, expected))


def test_the_general_path_sees_no_tensor_of_the_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    pack = TensorCache.pack

    def counted(self: TensorCache, tensor: Tensor) -> Any:
        if self.regions.current is not None:
            seen.append(tensor.numel())
        return pack(self, tensor)

    monkeypatch.setattr(TensorCache, "pack", counted)
    model = net()
    with ssdtrain.offload(model, **SETTINGS):
        settle(model)
        assert seen
        seen.clear()
        train(model, 1)
    assert not seen


def test_nothing_is_held_behind_the_forward() -> None:
    alive: list[weakref.ref[Any]] = []
    owner = Owner(lambda made: alive.append(weakref.ref(made.untyped_storage())))
    unseen = owner.proxy()

    def note(hidden: Tensor) -> Tensor:
        made = hidden.exp()
        unseen.value(made)
        return made * made

    model = net(note)
    with ssdtrain.offload(model, **SETTINGS):
        settle(model)
        alive.clear()
        loss = model(torch.randn(4, 8)).mean()
        gc.collect()
        assert [each() for each in alive] == [None] * 3
        loss.backward()
        gc.collect()
        assert [each() for each in alive] == [None] * 6


def write_inside(hidden: Tensor) -> Tensor:
    """Changes what its own operator has saved."""
    made = hidden.exp()
    again = made * 2
    made.add_(1)
    return again


def test_a_change_inside_the_forward_raises_as_plain_does() -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        train(net(write_inside), 1)
    model = net()
    with ssdtrain.offload(model, **SETTINGS):
        settle(model)
        model[1].act = write_inside
        loss = model(torch.randn(4, 8)).mean()
        with pytest.raises(InPlaceError):
            loss.backward()


def test_a_change_behind_the_forward_raises_as_plain_does() -> None:
    leaked: list[Tensor] = []
    owner = Owner(leaked)
    unseen = owner.proxy()

    def leak(hidden: Tensor) -> Tensor:
        made = hidden.exp()
        unseen.value.append(made)
        return made * made

    for settings in (None, SETTINGS):
        model = net(leak)
        session = None if settings is None else ssdtrain.offload(model, **settings)
        settle(model)
        leaked.clear()
        loss = model(torch.randn(4, 8)).mean()
        with torch.no_grad():
            leaked[-1].add_(1)
        error = RuntimeError if settings is None else InPlaceError
        with pytest.raises(error, match="inplace operation"):
            loss.backward()
        if session is not None:
            session.close()


def test_a_rerun_that_saves_others_is_an_error() -> None:
    width = Owner(16)
    unseen = width.proxy()

    def narrow(hidden: Tensor) -> Tensor:
        made = hidden[:, : unseen.value].exp()
        return hidden * made.sum()

    model = net(narrow)
    with ssdtrain.offload(model, **SETTINGS):
        settle(model)
        loss = model(torch.randn(4, 8)).mean()
        width.value = 8
        with pytest.raises(RegionError, match="now that it ran again"):
            loss.backward()


def test_noise_that_is_drawn_after_it_was_saved_is_refused() -> None:
    model = net()
    with ssdtrain.offload(model, **SETTINGS):
        settle(model)
        model[1].act = nn.RReLU()
        loss = model(torch.randn(4, 8)).mean()
        with pytest.raises(InPlaceError, match="rrelu"):
            loss.backward()


def test_what_nobody_asks_for_goes_when_backward_ends() -> None:
    model = net()
    with ssdtrain.offload(model, **SETTINGS) as session:
        settle(model)
        train(model, 1)
        assert session.last_step is not None
        usual = session.last_step.saved_peak_bytes
        for _ in range(3):
            loss = model(torch.randn(4, 8)).mean()
            torch.autograd.grad(loss, [model[2].down.weight], retain_graph=True)
            torch.autograd.grad(loss, [model[2].down.weight])
            del loss
        train(model, 1)
        assert session.last_step.saved_peak_bytes == usual


class Seeded(torch.autograd.Function):
    """Saves a tensor of another device, as attention on a GPU saves its seed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, torch.empty(2, device="meta"))
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        _, seed = ctx.saved_tensors
        assert seed.device.type == "meta"
        return grad * 2


def test_a_tensor_of_another_device_is_made_again_as_well() -> None:
    expected = train(net(Seeded.apply), 4)
    model = net(Seeded.apply)
    with ssdtrain.offload(model, **SETTINGS) as session:
        assert all(map(torch.equal, train(model, 4), expected))
        assert session.last_step is not None
        assert session.last_step.bytes_recomputed > 0


def doubled(hidden: Tensor) -> Tensor:
    """Saves one tensor twice."""
    made = hidden.exp()
    return made * made + made.t().contiguous().t()


@pytest.mark.parametrize("act", [torch.tanh, doubled])
def test_looks_that_were_equal_twice_are_compared_by_guards(
    act: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    looks_of = savedindex.looks_of

    def counted(tensors: list[Tensor]) -> list[Any]:
        asked.append(len(tensors))
        return looks_of(tensors)

    monkeypatch.setattr(savedindex, "looks_of", counted)
    monkeypatch.setattr(regioncall, "looks_of", counted)
    expected = train(net(act), 8)
    model = net(act)
    with ssdtrain.offload(model, **SETTINGS):
        found = train(model, 6)
        asked.clear()
        found += train(model, 8)[len(found) :]
    assert all(map(torch.equal, found, expected))
    assert not asked


@pytest.mark.parametrize("what", ["dtype", "shape", "strides", "gradient"])
def test_guards_see_tensors_of_other_looks(what: str) -> None:
    """In the forward they are another layout; in its re-run they are an error."""
    given = Owner(None)
    unseen = given.proxy()

    def act(hidden: Tensor) -> Tensor:
        if unseen.value == "dtype":
            return hidden.double().exp().to(hidden.dtype)
        if unseen.value == "shape":
            return hidden.unsqueeze(0).exp().squeeze(0)
        if unseen.value == "strides":
            return hidden.t().contiguous().exp().t()
        return hidden.detach().exp() if unseen.value else hidden.exp()

    def run(model: nn.Module, values: list[Any]) -> list[Tensor]:
        found = []
        for number, value in enumerate(values):
            given.value = value
            torch.manual_seed(number)
            model(torch.randn(4, 8)).square().mean().backward()
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            model.zero_grad()
        return found

    values = [None] * 5 + [what, None, what, what, what, None]
    expected = run(net(act), values)
    model = net(act)
    with ssdtrain.offload(model, **SETTINGS):
        assert all(map(torch.equal, run(model, values), expected))
        given.value = None
        loss = model(torch.randn(4, 8)).mean()
        given.value = what
        with pytest.raises(RegionError):
            loss.backward()


@functools.lru_cache
def table() -> Tensor:
    """A table that nobody sees, as rotary embeddings are cached."""
    return torch.linspace(0.5, 1.5, 16)


class Viewing(Block):
    """Saves a view of its result."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x)).view(2, -1).view(4, 8)


class Reading(Block):
    """Saves a part of a table."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x)) * table()[:8]


class Detaching(Block):
    """Saves a tensor that shares a table's bytes, and is no view."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x)) * table()[:8].detach()


@pytest.mark.parametrize("kind", [Viewing, Reading, Detaching])
def test_a_change_of_what_shares_the_bytes_raises_as_plain_does(
    kind: type[nn.Module],
) -> None:
    def run(session: bool) -> None:
        torch.manual_seed(0)
        table.cache_clear()
        model = nn.Sequential(*(kind() for _ in range(3)))
        context = ssdtrain.offload(model, **SETTINGS) if session else nullcontext()
        with context:
            for _ in range(4):
                model(torch.randn(4, 8)).sum().backward()
            made = model(torch.randn(4, 8))
            (made.detach() if kind is Viewing else table()).mul_(2)
            made.sum().backward()

    with pytest.raises(RuntimeError, match="inplace operation"):
        run(session=False)
    with pytest.raises(InPlaceError, match="inplace operation"):
        run(session=True)
