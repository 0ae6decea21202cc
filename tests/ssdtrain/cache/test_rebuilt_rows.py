"""Rows that rebuild: a recipe is asked again at every step, and searched for if not."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ssdtrain
from ssdtrain.cache.record import RebuiltView
from ssdtrain.cache.rows import (
    HostRow,
    RebuiltAgainRow,
    RebuiltRow,
    StayRow,
    bare,
)
from ssdtrain.cache.tables import Tables
from ssdtrain.errors import ActivationChangedError
from ssdtrain.plan.placement import Placement
from ssdtrain.rebuild.finder import Finder
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.cache.plans import rebuilding
from tests.ssdtrain.cache.steps import Step, train

WIDTH, ROWS, NUM_BLOCKS = 32, 64, 2
SETTINGS: dict[str, Any] = {"target": "host", "min_bytes": 1, "max_overhead": 0.0}
FIRST_TABLE = 6
"""Steps before this one observe, or are watched to compile the plan."""


class Block(nn.Module):
    """Norm, activation, gate, dropout-free; `how` may change what it does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, 2 * WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, how: str) -> Tensor:
        epsilon = 1e-2 if how == "epsilon" else 1e-5
        y = F.layer_norm(x, (WIDTH,), self.norm.weight, self.norm.bias, epsilon)
        a = self.gate(y)
        kind = "tanh" if how == "tanh" else "none"
        g = F.silu(a) if how == "silu" else F.gelu(a, approximate=kind)
        if how == "clamp":
            with torch.no_grad():
                g.clamp_(min=0)
        return x + self.down(g * self.up(y))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block() for _ in range(NUM_BLOCKS)])

    def forward(self, x: Tensor, how: str = "") -> Tensor:
        for block in self.blocks:
            x = block(x, how)
        return x


def batch(number: int) -> Tensor:
    torch.manual_seed(100 + number)
    return torch.randn(ROWS, WIDTH)


def changing(how: str, at: int = 8) -> Step:
    def step(net: nn.Module, number: int) -> Tensor:
        return net(batch(number), how if number >= at else "").square().mean()

    return step


def compare(
    step: Step,
    num_steps: int = 11,
    others: Placement = Placement.KEEP,
    another_at: int = -1,
    model: type[nn.Module] = Net,
) -> tuple[ssdtrain.Session, list[int]]:
    """Every step is bitwise that without ssdtrain; how often each searched.

    another_at: the first step under another plan of the same kind.
    """
    expected = list(train(model(), step, num_steps))
    net, searches = model(), []
    with ssdtrain.offload(net, **SETTINGS) as session:
        finder: Finder = session.cache.recipes.finder  # type: ignore[attr-defined]
        find, count = finder.find, [0]

        def counted(*args: Any) -> Any:
            count[0] += 1
            return find(*args)

        finder.find = counted  # type: ignore[method-assign]
        for number, found in enumerate(train(net, step, num_steps)):
            searches.append(count[0])
            count[0] = 0
            for ours, theirs in zip(found, expected[number], strict=True):
                assert ours.isfinite().all()  # else all are alike
                assert same_bits(ours, theirs), f"step {number}"
            if session.plan is not None and session.plan.policy != "rebuilding":
                session.follow(rebuilding(session, others))
            if number == another_at - 1:
                session.follow(replace(rebuilding(session, others)))
        assert session.cache.is_idle
        assert session.live_bytes == 0
        tables = session.cache.tables.tables.values()
        assert any(type(r) is RebuiltRow for table in tables for r in table.rows)
    return session, searches


class Norm(nn.Module):
    """As Llama's: nobody saves what it widens, so a recipe stores that narrow."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, dtype=torch.bfloat16))

    def forward(self, x: Tensor, how: str) -> Tensor:
        wide = x.float()
        if how == "written":
            with torch.no_grad():
                wide.mul_(2.0)
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * normed.bfloat16()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        linear = partial(nn.Linear, WIDTH, WIDTH, dtype=torch.bfloat16)
        self.first = linear()
        self.norms = nn.ModuleList([Norm() for _ in range(3)])
        self.linears = nn.ModuleList([linear() for _ in range(3)])

    def forward(self, x: Tensor, how: str = "") -> Tensor:
        x = self.first(x.bfloat16())
        for norm, each in zip(self.norms, self.linears, strict=True):
            x = x + each(norm(x, how))
        return x.float()


def copies_of(session: ssdtrain.Session) -> list[type]:
    """Rows of what recipes store."""
    tables = session.cache.tables.tables.values()
    rows = [bare(row) for table in tables for row in table.rows]
    copies = [row.copy for row in rows if type(row) is RebuiltRow]
    return [type(copy) for copy in copies if copy is not None]


@pytest.mark.parametrize("others", [Placement.KEEP, Placement.OFFLOAD])
def test_a_widened_tensor_that_is_written_to_is_not_stored_narrow(
    others: Placement,
) -> None:
    _, searches = compare(changing("written"), others=others, model=Normed)
    assert searches[7] == 0 < searches[8]


@pytest.mark.parametrize("others", [Placement.KEEP, Placement.OFFLOAD])
def test_what_a_recipe_stores_has_a_row(others: Placement) -> None:
    """It stays or moves as the plan says, and is read in every backward."""

    def twice(net: nn.Module, number: int) -> Tensor:
        loss = changing("")(net, number)
        if number > FIRST_TABLE:
            loss.backward(retain_graph=True)
        return loss

    num_steps = FIRST_TABLE + 4
    expected, net = list(train(Normed(), twice, num_steps)), Normed()
    with ssdtrain.offload(net, **SETTINGS) as session:
        for found, theirs in zip(train(net, twice, num_steps), expected, strict=True):
            assert all(map(same_bits, found, theirs))
            if session.plan is not None and session.plan.policy != "rebuilding":
                session.follow(rebuilding(session, others))
        kind = StayRow if others is Placement.KEEP else HostRow
        assert copies_of(session) == [kind] * 3
        assert session.cache.is_idle and session.live_bytes == 0


def test_places_of_what_recipes_store_are_known() -> None:
    """Tables for other sizes have the same ones, and the next plan counts with them."""
    net = Normed()
    with ssdtrain.offload(net, **SETTINGS) as session:
        for _ in train(net, changing(""), FIRST_TABLE + 4):
            if session.plan is not None and session.plan.policy != "rebuilding":
                session.follow(rebuilding(session, Placement.OFFLOAD))
        assert session.cache.is_idle
        used_bytes = session.cache.offloader.pool.used_bytes
        assert sum(session.cache.tables.place_sizes) == used_bytes > 0


@pytest.mark.parametrize("model", [Net, Normed])
@pytest.mark.parametrize("others", [Placement.KEEP, Placement.OFFLOAD])
def test_marks_and_bytes_are_the_general_paths(
    others: Placement, model: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What recipes read, and what they store, is counted as records of the general path
    are."""
    found, mark = [], 0
    step = changing("")
    with ssdtrain.offload(net := model(), **SETTINGS) as session:
        for number, _ in enumerate(train(net, step, FIRST_TABLE + 6)):
            if session.plan is not None and session.plan.policy != "rebuilding":
                session.follow(rebuilding(session, others))
            if number == FIRST_TABLE + 2:
                (table,) = session.cache.tables.tables.values()
                kinds = {type(bare(row)) for row in table.rows}
                read = StayRow if others is Placement.KEEP else HostRow
                assert {RebuiltRow, read} <= kinds | set(copies_of(session))
                general = lambda own, cache, lane, plan, all: all  # noqa: E731
                monkeypatch.setattr(Tables, "hooks_of", general)
            before, mark = mark, session.cache.cursor.mark
            if number > FIRST_TABLE:
                found.append(mark - before)
        reports = session.steps[-5:]
    assert len(set(found)) == 1, found
    for name in ("num_records", "bytes_saved", "bytes_kept", "bytes_offloaded"):
        assert len({getattr(report, name) for report in reports}) == 1, name
    for name in ("bytes_recomputed", "bytes_reloaded", "saved_peak_bytes"):
        assert len({getattr(report, name) for report in reports}) == 1, name


@pytest.mark.parametrize("how", ["epsilon", "tanh", "silu", "clamp"])
def test_a_program_that_changes_under_its_rows(how: str) -> None:
    _, searches = compare(changing(how))
    assert searches[7] == 0 < searches[8]


@pytest.mark.parametrize("others", [Placement.KEEP, Placement.OFFLOAD])
def test_a_plan_searches_for_nothing_that_was_found(others: Placement) -> None:
    """Neither the first one, behind the observed steps, nor another one."""
    session, searches = compare(changing(""), others=others, another_at=8)
    assert session.cache.tables.num_made == 2, searches
    at = next(n for n, num in enumerate(searches) if not num)
    assert 0 < at < FIRST_TABLE and not any(searches[at:]), searches


class Deep(Net):
    """Four blocks, the last one with another constant if `how` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.extend(Block() for _ in range(2))

    def forward(self, x: Tensor, how: str = "") -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x, how if number == 3 else "")
        return x


def shrinking(how: str) -> Step:
    """Another length from step 8 on, and again from step 10 on."""

    def step(net: nn.Module, number: int) -> Tensor:
        num = ROWS - 8 * (number >= 8) - 8 * (number >= 10)
        return net(batch(number)[:num], how if number >= 10 else "").square().mean()

    return step


@pytest.mark.parametrize("how", ["", "epsilon", "tanh"])
def test_at_another_length_one_layer_is_searched_for_all(how: str) -> None:
    """And where a layer is another one, it shows."""
    _, searches = compare(shrinking(how), num_steps=12, model=Deep)
    assert searches[7] == searches[9] == searches[11] == 0, searches
    once = searches[8]
    assert 0 < once <= searches[0] / 4, searches
    assert (searches[10] > once) == bool(how), searches


class Dropping(nn.Module):
    """A narrow cast of a dropout of a norm: the argument of one module, and the input
    of another one, at the same place of their nodes. `how` writes between the two."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, how: str = "") -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.norm(self.shift + x)
            if how:
                with torch.no_grad():
                    y.mul_(2.0)
            found: Tensor = self.last(self.dropout(y))
        return found.float()


def test_what_is_written_between_two_modules_is_noticed() -> None:
    """Nobody saved it, and plain autograd does not mind."""
    step, num_bytes = changing("between"), 2 * ROWS * WIDTH
    expected, net = list(train(Dropping(), step, 11)), Dropping()
    with ssdtrain.offload(net, **SETTINGS) as session:
        for found, theirs in zip(train(net, step, 11), expected, strict=True):
            assert all(map(same_bits, found, theirs))
            if session.plan is not None and session.plan.policy != "rebuilding":
                session.follow(rebuilding(session, Placement.KEEP))
        reports = session.steps
    casts = [report.recipes.get("ToCopyBackward0", 0) for report in reports]
    # The cast of the weight remains.
    assert casts[7] - casts[8] == num_bytes, casts


class Turned(Net):
    """What a recipe makes is saved as a view of it, in another shape."""

    def forward(self, x: Tensor, how: str = "") -> Tensor:
        x = super().forward(x, how)
        return x * F.gelu(x).view(WIDTH, ROWS).square().view(ROWS, WIDTH)


def test_a_view_comes_back_as_a_view() -> None:
    _, searches = compare(changing(""), model=Turned)
    assert searches[-1] == 0


def test_the_self_check_looks_at_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe that goes wrong behind its admission is found."""
    monkeypatch.setattr("ssdtrain.cache.verify.SELF_CHECK_PERIOD", 1)
    net = Net()
    with ssdtrain.offload(net, **SETTINGS) as session:
        steps = train(net, changing(""), 12)
        for number, _ in enumerate(steps):
            if session.plan is not None and session.plan.policy != "rebuilding":
                session.follow(rebuilding(session))
            if number == FIRST_TABLE:
                break
        for table in session.cache.tables.tables.values():
            again = {r.item for r in table.rows if type(r) is RebuiltAgainRow}
            for row in table.rows:
                if type(row) is RebuiltRow and row.item not in again:
                    break_recipe(row)
        with pytest.raises(ActivationChangedError):
            list(steps)


def break_recipe(row: RebuiltRow) -> None:
    expression = row.compiled.expression
    function = expression.function
    row.compiled.expression = replace(
        expression, function=lambda *a, **k: function(*a, **k) + 1
    )


class Two(nn.Module):
    """Its activation is saved by two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.a, self.b = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.up(x))
        return self.a(y) * self.b(y)


def test_what_is_rebuilt_once_is_rebuilt_for_all() -> None:
    """Also in a short batch, where by its size it is no item: else the second layer
    would hold the bytes, and rebuilding them spared nothing."""
    model = Two()
    least_bytes = ROWS * WIDTH * 4
    settings = {"max_overhead": 0.01, **SETTINGS, "min_bytes": least_bytes}
    with ssdtrain.offload(model, **settings) as session:
        for number in range(4):
            model(batch(number)).square().mean().backward()
            with torch.no_grad():
                model.up.weight.mul_(0.9)
        session.follow(rebuilding(session))
        result = model(batch(4)[: ROWS // 4])
        sources = [
            layer._raw_saved_mat1.data.source
            for layer, _ in result.grad_fn.next_functions
        ]
        assert [type(each) for each in sources] == [RebuiltView] * 2
        assert sources[0].rebuilt is sources[1].rebuilt
        result.square().mean().backward()
