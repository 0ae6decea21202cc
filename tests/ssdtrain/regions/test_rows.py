"""Planned regions are served by rows of the compiled plan."""

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

import ssdtrain
from ssdtrain.cache import verify
from ssdtrain.cache.regions import Choice
from ssdtrain.cache.rows import (
    GeneralRow,
    HostRow,
    PlacedRow,
    RebuiltAgainRow,
    RegionRow,
)
from ssdtrain.cache.tables import Tables
from ssdtrain.errors import ActivationChangedError
from ssdtrain.plan.placement import Placement
from ssdtrain.plan.profile import Item
from ssdtrain.plan.regions import spread
from ssdtrain.plan.timeline import Timeline
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.cache.steps import train
from tests.ssdtrain.calls import calls_of
from tests.ssdtrain.regions.plans import recipes_beside, some_again
from tests.ssdtrain.unseen import Owner

WIDTH, ROWS = 32, 16
SETTINGS: dict[str, Any] = {
    "max_overhead": 0.01,
    "target": "host",
    "min_bytes": 1,
    "window_bytes": 1 << 14,
}


class Block(nn.Module):
    """Saves its input, results of operators, views, a mask, and a tensor that all
    blocks are given."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.how: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        hidden = self.up(self.norm(x) * table)
        if self.how is not None:
            hidden = self.how(hidden)
        hidden = torch.sin(F.gelu(hidden)).view(-1, 2, WIDTH).flatten(1)
        result: Tensor = x + self.dropout(self.down(hidden))
        return result


class Net(nn.Module):
    def __init__(self, num_blocks: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        table = torch.sigmoid(x[:1])
        for block in self.blocks:
            x = block(x, table)
        return x


def batch(number: int, rows: int = ROWS) -> Tensor:
    torch.manual_seed(100 + number)
    return torch.randn(rows, WIDTH)


def planned(
    session: ssdtrain.Session,
    inputs: Placement = Placement.KEEP,
    share: float = 1.0,
) -> None:
    """Follow a plan: this share of the regions runs again, and their inputs and what
    no region makes are placed so."""
    assert session.profile is not None
    num_again = round(share * len(spread(Timeline(session.profile))))
    assert num_again

    def place(item: Item) -> Placement:
        return Placement.KEEP if item.region >= 0 else inputs

    session.follow(some_again(session, place, num_again))


NUM_OBSERVED, NUM_COMPILED = 5, 7
"""Steps before there is a profile, and before there is a table."""


def run_both(
    model: Net,
    loss_of: Callable[[nn.Module, int], Tensor],
    num_steps: int = 10,
    rows: Counter[type] | None = None,
    **plan: Any,
) -> ssdtrain.Session:
    """Plain training and training under a plan with regions: the same bits. `rows` is
    told of the table's."""
    plain = list(train(copy.deepcopy(model), loss_of, num_steps))
    session = ssdtrain.offload(model, **SETTINGS, recompute="regions")
    with session:
        for number, found in enumerate(train(model, loss_of, num_steps)):
            assert same_bits(found, plain[number]), number
            if number == NUM_OBSERVED:
                planned(session, **plan)
            if number == NUM_COMPILED + 1 and rows is not None:
                (table,) = session.cache.tables.tables.values()
                rows.update(map(type, table.rows))
    return session


def mean(model: nn.Module, number: int, rows: int = ROWS) -> Tensor:
    loss: Tensor = model(batch(number, rows)).square().mean()
    return loss


@pytest.mark.parametrize("inputs", [Placement.KEEP, Placement.OFFLOAD])
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_rows_serve_what_planned_regions_save(inputs: Placement, share: float) -> None:
    rows: Counter[type] = Counter()
    session = run_both(Net(), mean, inputs=inputs, share=share, rows=rows)
    last = session.last_step
    assert last is not None and not last.fallbacks
    assert last.recipes["region"] > 0
    assert not rows[GeneralRow], rows
    assert rows[RegionRow] > 5
    assert bool(rows[HostRow]) == (inputs is Placement.OFFLOAD)
    # Its input is stored as one, and saved in the region again.
    assert rows[PlacedRow] >= 4 * share


class Twice(Net):
    """Every block is called twice."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        table = torch.sigmoid(x[:1])
        for block in [*self.blocks, *self.blocks]:
            x = block(x, table)
        return x


class Pair(Block):
    """Two results, one of the other."""

    def forward(self, x: Tensor, table: Tensor) -> Any:
        y = super().forward(x, table)
        return y, y.sin()


class Pairs(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Pair() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        table = torch.sigmoid(x[:1])
        for block in self.blocks:
            x, y = block(x, table)
            x = x + y
        return x


class Inner(nn.Module):
    """Blocks inside a region, which may be the user's checkpoints."""

    def __init__(self, is_checkpointed: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Block() for _ in range(2))
        self.is_checkpointed = is_checkpointed

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        for part in self.parts:
            if self.is_checkpointed:
                x = checkpoint(part, x, table, use_reentrant=False)
            else:
                x = part(x, table)
        return x


class Nested(Net):
    is_checkpointed = False

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Inner(self.is_checkpointed) for _ in range(3))


class CheckpointedInside(Nested):
    is_checkpointed = True


class CheckpointedOutside(Net):
    """Every other block is in a checkpoint of the user's, and is no region."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        table = torch.sigmoid(x[:1])
        for number, block in enumerate(self.blocks):
            if number % 2:
                x = checkpoint(block, x, table, use_reentrant=False)
            else:
                x = block(x, table)
        return x


class Compiled(Net):
    def __init__(self) -> None:
        super().__init__(2)
        for block in self.blocks:
            block.compile(backend="aot_eager")


# Dynamo looks at `.grad` of a tensor that is no leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize(
    "kind", [Twice, Pairs, Nested, CheckpointedInside, CheckpointedOutside, Compiled]
)
def test_programs_that_use_their_blocks_otherwise(kind: type[Net]) -> None:
    rows: Counter[type] = Counter()
    session = run_both(kind(), mean, 10, inputs=Placement.OFFLOAD, rows=rows)
    last = session.last_step
    assert last is not None and not last.fallbacks and last.recipes["region"] > 0
    assert not rows[GeneralRow] and rows[HostRow], rows


class Alike(nn.Module):
    """All that it saves looks alike."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.sin(self.up(torch.tanh(x)))
        result: Tensor = x + self.down(torch.cos(hidden))
        return result


class Fewer(Net):
    """Saves fewer tensors in front of its blocks at times, as one that is frozen."""

    fewer = False

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Alike() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x if self.fewer else torch.sin(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("inputs", [Placement.KEEP, Placement.OFFLOAD])
def test_rows_in_front_of_a_region_take_nothing_in_it(inputs: Placement) -> None:
    """Its tensors have places, which a re-run counts: one too few, and each node gets
    the next one's, which looks alike."""

    def loss_of(model: Any, number: int) -> Tensor:
        model.fewer = number > NUM_COMPILED
        return mean(model, number)

    run_both(Fewer(), loss_of, inputs=inputs)


class Checkpointed(Block):
    """As people write it: torch's checkpoint around the forward."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """Runs again in backward."""
        forward = super().forward
        found: Tensor = checkpoint(forward, x, table, use_reentrant=False)
        return found


def test_a_region_calls_no_more_than_a_checkpoint_of_torchs() -> None:
    """Of what the host does around a forward, with all that is looked at for safety."""
    model, theirs = Net(8, dropout=0.0), Net(8, dropout=0.0)
    for block in theirs.blocks:
        block.__class__ = Checkpointed
    x = batch(0)

    def step(net: Net) -> None:
        net(x).square().mean().backward()

    step(theirs)
    plain, others = calls_of(lambda: step(model))[1], calls_of(lambda: step(theirs))[1]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ssdtrain.offload(model, **SETTINGS, recompute="regions") as session:
        for number in range(NUM_COMPILED + 2):
            step(model)
            optimizer.step()
            optimizer.zero_grad()
            if number == NUM_OBSERVED:
                planned(session)
        ours = calls_of(lambda: step(model))[1]
    assert plain < ours < others, (plain, ours, others)


@pytest.mark.parametrize("inputs", [Placement.KEEP, Placement.OFFLOAD])
def test_marks_are_the_general_paths(
    inputs: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So moves come when the plan wants them; and the same bytes are counted."""
    model = Net()
    found, mark = [], 0
    with ssdtrain.offload(model, **SETTINGS, recompute="regions") as session:
        steps = train(model, mean, NUM_COMPILED + 5)
        for number, _ in enumerate(steps):
            cursor = session.cache.cursor
            if number == NUM_OBSERVED:
                planned(session, inputs, 0.5)
            if number == NUM_COMPILED + 2:
                general = lambda own, cache, lane, plan, all: all  # noqa: E731
                monkeypatch.setattr(Tables, "hooks_of", general)
            before, mark = mark, cursor.mark
            if number > NUM_COMPILED:
                found.append(mark - before)
        reports = session.steps[-4:]
    assert len(set(found)) == 1, found
    for name in ("num_records", "bytes_saved", "bytes_kept", "bytes_offloaded"):
        assert len({getattr(report, name) for report in reports}) == 1, name
    for name in ("bytes_recomputed", "bytes_parameters"):
        assert len({getattr(report, name) for report in reports}) == 1, name
    first, *_, last = (report.saved_peak_bytes for report in reports)
    assert abs(first - last) < 0.01 * last


class Twice(Block):
    """Two operators save what a recipe rebuilds."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        hidden = F.gelu(self.up(self.norm(x) * table))
        result: Tensor = x + self.down(torch.sin(hidden) * torch.cos(hidden))
        return result


def test_what_recipes_rebuild_in_batches_of_other_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In regions that do not run again now: their rows have a place as well."""
    monkeypatch.setattr("ssdtrain.api._first_regions", lambda *_: Choice.ALL)
    sizes = [ROWS] * 8 + [ROWS // 2, 3 * ROWS, ROWS, ROWS // 4]

    def loss_of(model: nn.Module, number: int) -> Tensor:
        return mean(model, number, sizes[number])

    model = Net()
    model.blocks = nn.ModuleList(Twice() for _ in range(4))
    plain = list(train(copy.deepcopy(model), loss_of, len(sizes)))
    with ssdtrain.offload(model, **{**SETTINGS, "max_overhead": 1.0}) as session:
        for number, found in enumerate(train(model, loss_of, len(sizes))):
            assert same_bits(found, plain[number]), number
            if number == NUM_OBSERVED:
                session.follow(some_again(session, recipes_beside(Placement.KEEP), 2))
            if number == NUM_COMPILED + 1:
                (table,) = session.cache.tables.tables.values()
                placed = [row.inner for row in table.rows if type(row) is PlacedRow]
    assert any(type(row) is RebuiltAgainRow for row in placed), placed


class Normed(nn.Module):
    """A residual block with transformers' unfused norm in bfloat16: it widens the
    block's input, which autograd does not save, and its statistics are small."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Qwen3RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        result: Tensor = x + self.up(self.norm(x)) * table
        return result


@pytest.mark.parametrize("num_again", [0, 2])
def test_regions_hide_no_recipe_of_a_norm(
    monkeypatch: pytest.MonkeyPatch, num_again: int
) -> None:
    """What is observed while all regions run again has the recipes of a step without
    regions, and a plan may use them in those that do not run again."""
    model = Net()
    model.blocks = nn.ModuleList(Normed() for _ in range(4))
    model.to(torch.bfloat16)

    def loss_of(model: nn.Module, number: int) -> Tensor:
        result: Tensor = model(batch(number).to(torch.bfloat16)).float().square().mean()
        return result

    settings = {**SETTINGS, "min_bytes": ROWS * 4 + 1, "max_overhead": 1.0}
    recipes = {}
    for choice in (Choice.NONE, Choice.ALL):
        monkeypatch.setattr("ssdtrain.api._first_regions", lambda *_, it=choice: it)
        ours = copy.deepcopy(model)
        plain = train(copy.deepcopy(model), loss_of, 12)
        with ssdtrain.offload(ours, **settings) as session:
            for number, found in enumerate(train(ours, loss_of, 12)):
                assert same_bits(found, next(plain)), number
                if number == NUM_OBSERVED and choice is Choice.ALL:
                    recipes_of = recipes_beside(Placement.KEEP)
                    session.follow(some_again(session, recipes_of, num_again))
            profile, last = session.profile, session.last_step
            assert profile is not None and last is not None
            (items,) = profile.kinds.values()
            recipes[choice] = [
                (item.name, item.recipe) for item in items if item.serves < 0
            ]
            if choice is Choice.ALL:
                assert sum(last.recipes.values()) > 0 and not last.fallbacks
    assert recipes[Choice.ALL] == recipes[Choice.NONE]
    assert sum(made is not None for _, made in recipes[Choice.ALL]) >= 2 * 4


def test_a_parameter_where_a_tensor_was() -> None:
    """It has no place in the region, and is not dropped with it."""

    class Other(Net):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(ROWS, 2 * WIDTH))

    def loss_of(model: Any, number: int) -> Tensor:
        tensor = torch.linspace(0, 1, 2 * WIDTH).repeat(ROWS, 1)
        other = model.weight if number in (8, 10) else tensor
        model.blocks[1].how = lambda hidden: hidden * other
        loss: Tensor = mean(model, number) + 0.1 * model.weight.sum()
        return loss

    run_both(Other(), loss_of, 12)


def test_one_in_many_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-check sees what rows drop, and its error stops backward."""
    monkeypatch.setattr(verify, "SELF_CHECK_PERIOD", 1)
    model, factor = Net(dropout=0.0), Owner(1.0)
    unseen = factor.proxy()

    def loss_of(model: Any, number: int) -> Tensor:
        model.blocks[1].how = lambda hidden: hidden * unseen.value
        return mean(model, number)

    with ssdtrain.offload(model, **SETTINGS, recompute="regions") as session:
        for number, _ in enumerate(train(model, loss_of, NUM_COMPILED + 2)):
            if number == NUM_OBSERVED:
                planned(session)
        assert session.last_step is not None and session.last_step.num_verified > 0
        loss = loss_of(model, NUM_COMPILED + 2)
        factor.value = 2.0
        with pytest.raises(ActivationChangedError, match=r"made again by blocks\.1"):
            loss.backward()


class Copies(Block):
    """Copies its input where `how` is set: the bytes are not the row's."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """As `Block`, which applies nothing."""
        how, self.how = self.how, None
        try:
            return super().forward(x if how is None else x * 1.0, table)
        finally:
            self.how = how


@pytest.mark.parametrize("inputs", [Placement.KEEP, Placement.OFFLOAD])
def test_a_stored_row_that_does_not_fit_is_indexed_once(inputs: Placement) -> None:
    net = Net()
    net.blocks = nn.ModuleList(Copies() for _ in range(4))

    def loss_of(model: Any, number: int) -> Tensor:
        copies = number in (9, 11)
        model.blocks[1].how = (lambda hidden: hidden) if copies else None
        return mean(model, number)

    run_both(net, loss_of, 13, inputs=inputs)
