"""[Note: the last save]: what a library writes past the version counter, between two
saves of the same bytes, is what backward sees."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ssdtrain
from tests.ssdtrain.cache.plans import all_moved
from tests.ssdtrain.graphs.unusual import Column, Written

ALL = {"max_overhead": 0.01, "min_bytes": 0, "window_bytes": 1}


class Columns(nn.Module):
    """Fills each column of a buffer once, before it is first read."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(16, 16)
        self.w = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        k = torch.zeros(*x.shape, 3)
        for column in range(3):
            k = Column.apply(k, torch.tanh(self.f(x)), column)
            x = x + (k[..., : column + 1] * self.w[: column + 1]).sum(-1)
        return x


class History(nn.Module):
    """NumPy fills a buffer; a strided part of it is saved before the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        history = torch.zeros(4, 8, 16)
        alias, total = history.numpy(), self.f(x)
        for at in (0, 2, 1, 3):
            alias[at] = x.detach().numpy() * (at + 1)
            if at == 2:
                total = total * (1 + history[::2].sum(0) * (history[::2] * total)[0])
        return (history * total).sum(0)


class Rotated(nn.Module):
    """A kernel rotates parts of a joint projection, after another part was saved."""

    def __init__(self, *, direct: bool = False) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.direct = direct

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        saved = value * value.sigmoid()
        if self.direct:
            query.data.mul_(0.5)
        else:
            query, key = Written.apply(query, 0.5), Written.apply(key, -1.5)
        return x + self.out((query * key) * saved)


class Twice(nn.Module):
    """The first product is never used; a kernel writes before the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.f(x)
        y * y
        y = Written.apply(y, 0.5)
        z = self.f(x).exp()  # a record between the two
        return (y * y) * z


MODELS: dict[str, Callable[[], nn.Module]] = {
    "columns": Columns,
    "history": History,
    "rotated": Rotated,
    "rotated directly": lambda: Rotated(direct=True),
    "twice": Twice,
}


def gradients(
    make: Callable[[], nn.Module], settings: dict[str, Any] | None, steps: int
) -> list[Tensor]:
    torch.manual_seed(0)
    model, found = make(), []
    session = None if settings is None else ssdtrain.offload(model, **settings)
    for _ in range(steps):
        model(torch.randn(8, 16)).square().mean().backward()
        found += [each.grad for each in model.parameters() if each.grad is not None]
        model.zero_grad()
    if session is not None:
        session.close()
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "settings",
    [
        {"target": "host", "plan": "offload-all", "recompute": "off"},
        {"target": "ssd", "plan": "offload-all", "recompute": "off"},
        {"target": "host", "plan": "offload-all", "recompute": "full"},
        {"plan": "offload-all", "recompute": "off", "verify": "checksum"},
        {"max_overhead": 1.0, "recompute": "off"},  # by tables, after some steps
        {"max_overhead": 1.0},
        {"plan": "keep-all", "recompute": "full"},
    ],
    ids=["host", "ssd", "full", "checksum", "planned", "recipes", "keep"],
)
def test_what_backward_sees_is_of_the_last_save(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    if settings.get("target") == "ssd":
        settings = {**settings, "directory": str(tmp_path)}
    plain = gradients(MODELS[name], None, 12)
    found = gradients(MODELS[name], {**ALL, **settings}, 12)
    assert len(found) == len(plain)
    assert all(map(torch.equal, found, plain))


class Joint(Rotated):
    """Parts of a joint projection that are saved in several operators."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.out(x)
        y * y  # a row of a dense item
        y = Written.apply(y, 0.5)
        return super().forward(x) + (y * y).tanh()


def steps_under_a_plan(session: ssdtrain.Session | None, model: nn.Module) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(8):
        if session is not None and step == 3:
            session.follow(all_moved(session))
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        yield [each.grad.clone() for each in model.parameters()]
        optimizer.zero_grad()


@pytest.mark.parametrize("direct", [False, True])
def test_rows_send_at_the_last_save(direct: bool) -> None:
    torch.manual_seed(0)
    plain = list(steps_under_a_plan(None, Joint(direct=direct)))
    torch.manual_seed(0)
    model = Joint(direct=direct)
    settings = {"plan": "auto", "max_overhead": 1.0, "recompute": "off"}
    with ssdtrain.offload(model, target="host", **{**ALL, **settings}) as session:
        found = list(steps_under_a_plan(session, model))
    for ours, theirs in zip(found, plain, strict=True):
        assert all(map(torch.equal, ours, theirs))
    last = session.steps[-1]
    assert last.bytes_offloaded > 0.9 * last.bytes_saved
    assert last.bytes_offloaded + last.bytes_kept == last.bytes_saved
