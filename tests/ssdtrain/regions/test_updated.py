"""Buffers that a forward updates in place are updated once, and its region runs again.

Compared with plain training: losses, gradients, weights and all buffers, to the bit.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

import ssdtrain
from ssdtrain.counters import Fallback
from ssdtrain.errors import InPlaceError
from ssdtrain.plan.placement import Placement
from ssdtrain.regions.updated import Updated
from ssdtrain.transfer.device import CpuDevice
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.regions.plans import some_again
from tests.ssdtrain.unseen import Owner

WIDTH, BATCH, STEPS = 8, 6, 5
SETTINGS: dict[str, Any] = {"recompute": "regions", "plan": "keep-all", "min_bytes": 0}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.norm = self.made()

    def made(self) -> nn.Module:
        return nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.part(x)))


class Cumulative(Block):
    """All batches count alike: the factor is read from the number of batches."""

    def made(self) -> nn.Module:
        return nn.BatchNorm1d(WIDTH, momentum=None)


class ReadsStatistics(Block):
    """Its result depends on the statistics, before and after their update."""

    def forward(self, x: Tensor) -> Tensor:
        before = self.norm.running_mean.mean()
        x = super().forward(x)
        return x * (1 + before) + self.norm.running_var.clone()[:, None]


class OfItsOwn(nn.BatchNorm1d):
    """As timm's, whose forward is its own."""

    def forward(self, x: Tensor) -> Tensor:
        self.num_batches_tracked.add_(1)
        mean, var = self.running_mean, self.running_var
        found = functional.batch_norm(
            x, mean, var, self.weight, self.bias, True, 1 / float(1 + mean.norm())
        )
        return torch.relu(found)


class OwnForward(Block):
    def made(self) -> nn.Module:
        return OfItsOwn(WIDTH)


class Spectral(Block):
    """Updates two vectors, and reads them."""

    def made(self) -> nn.Module:
        return parametrizations.spectral_norm(nn.Conv1d(WIDTH, WIDTH, 1))


class Drops(Block):
    """Draws, so that its re-run goes on to its end."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(super().forward(x), 0.5)


class Counts(Block):
    """Scales by the number of calls so far."""

    def made(self) -> nn.Module:
        return Counter()


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("number", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        return x * self.number.sqrt()


class NoVersion(Block):
    """Torch counts no version where `F.batch_norm` writes."""

    def made(self) -> nn.Module:
        return Statistics()


class Statistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("var", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        training = self.training
        return functional.batch_norm(x, self.mean, self.var, None, None, training)


class View(Statistics):
    """Autograd saves views of the buffers."""

    def forward(self, x: Tensor) -> Tensor:
        mean, var = self.mean.view(-1), self.var.view(-1)
        return functional.batch_norm(x, mean, var, None, None, self.training)


class OfViews(Block):
    def made(self) -> nn.Module:
        return View()


class Compiled(Block):
    """Autograd saves what compiled code makes of the statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.compile(backend="aot_eager")


class Keeps(Block):
    """Reads the statistics by another name than theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [(self.norm.running_mean, self.norm.running_var)]

    def forward(self, x: Tensor) -> Tensor:
        mean, var = self.kept[0]
        return super().forward(x * (1 + mean.mean())) * var.mean()


class Shares(Block):
    """Reads a view of them."""

    def __init__(self) -> None:
        super().__init__()
        self.shown = self.norm.running_var.view(-1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.shown


class Codes(Block):
    """Updates a table past its version when backward's tensors are saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x) * self.table.detach()[:, None]
        self.table.data.mul_(0.9)
        return found


class Later(Codes):
    """Begins with it in its fourth call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("number", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        found = Block.forward(self, x) * self.table.detach()[:, None]
        if self.number > 3:
            self.table.data.mul_(0.9)
        return found


KNOWN = [Block, Cumulative, Drops, Compiled]
OTHERS = [ReadsStatistics, OwnForward, Spectral, Counts, NoVersion, OfViews]
OTHERS += [Keeps, Shares, Codes, Later]


KERNEL = Owner(lambda buffer, x: buffer.data.lerp_(x.detach().mean((0, 2)), 0.1))
HIDDEN = KERNEL.proxy()


class Hidden(nn.Module):
    """A kernel writes in training, of which nobody sees the code."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            HIDDEN.value(self.mean, x)
        return x + self.mean[:, None]


class OfHidden(Block):
    def made(self) -> nn.Module:
        return Hidden()


class Stack(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def one_forward(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def two_forwards(model: nn.Module, x: Tensor) -> Tensor:
    """The second one updates the buffers that the first one has read."""
    return (model(x) - model(x.flip(0) + 1)).square().mean()


def reads_between(model: nn.Module, x: Tensor) -> Tensor:
    loss = one_forward(model, x)
    for buffer in model.buffers():
        if buffer.is_floating_point() and buffer.dim() == 1:
            loss = loss + buffer.detach().sum()
    return loss


def trained(
    kind: Callable[[], nn.Module],
    loss_of: Callable[[nn.Module, Tensor], Tensor] = one_forward,
    prepare: Callable[[nn.Module], object] = nn.Module.train,
    **settings: Any,
) -> tuple[list[Tensor], Any]:
    torch.manual_seed(0)
    model, found, session = Stack(kind), [], None
    prepare(model)
    if settings:
        session = ssdtrain.offload(model, **settings)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        torch.manual_seed(step)
        loss = loss_of(model, torch.randn(BATCH + step % 2, WIDTH, 5))
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
        found += [each.detach().clone() for each in model.state_dict().values()]
    reports = [] if session is None else session.steps
    if session is not None:
        session.close()
    return found, reports


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler asks for it
@pytest.mark.parametrize("verify", ["off", "shadow"])
@pytest.mark.parametrize("plan", ["keep-all", "offload-all"])
@pytest.mark.parametrize("kind", [*KNOWN, *OTHERS])
def test_buffers_are_updated_once(kind: type[Block], plan: str, verify: str) -> None:
    plain, _ = trained(kind)
    settings = {**SETTINGS, "plan": plan, "verify": verify, "target": "host"}
    ours, reports = trained(kind, **settings)
    assert same_bits(plain, ours)
    refused = [r.fallbacks.get(Fallback.NO_REGION.value, 0) for r in reports]
    assert refused == [0 if kind in KNOWN else 3] * STEPS
    regions = [bool(report.recipes.get("region")) for report in reports]
    assert regions == [kind in KNOWN] * STEPS


@pytest.mark.parametrize("loss_of", [two_forwards, reads_between])
@pytest.mark.parametrize("kind", [Block, Drops, *OTHERS])
def test_programs_that_use_a_model_otherwise(
    kind: type[Block], loss_of: Callable[[nn.Module, Tensor], Tensor]
) -> None:
    plain, _ = trained(kind, loss_of)
    ours, reports = trained(kind, loss_of, **SETTINGS)
    assert same_bits(plain, ours)
    found = [report.recipes.get("region", 0) > 0 for report in reports]
    assert found == [kind not in OTHERS] * STEPS


def test_a_model_that_was_in_evaluation_first() -> None:
    """What it writes in training is looked for again."""

    def in_turns(model: nn.Module, x: Tensor) -> Tensor:
        model.train(len(x) > BATCH)
        return one_forward(model, x)

    plain, _ = trained(OfHidden, in_turns)
    ours, reports = trained(OfHidden, in_turns, **SETTINGS)
    assert same_bits(plain, ours)
    assert [Fallback.NO_REGION.value in each.fallbacks for each in reports] == [
        *(False, True, True, True, True),
    ]


def test_a_normalization_that_is_frozen_has_no_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until it trains; a model that was frozen before and is trained later."""
    copied, values = list[int](), Updated.values

    def counted(updated: Updated) -> list[Tensor]:
        copied.append(len(updated.ids))
        return values(updated)

    def later(model: nn.Module, x: Tensor) -> Tensor:
        model.train(len(x) > BATCH)
        return one_forward(model, x)

    monkeypatch.setattr(Updated, "values", counted)
    for loss_of, copies in ((one_forward, False), (later, True)):
        copied.clear()
        plain, _ = trained(Block, loss_of, nn.Module.eval)
        ours, reports = trained(Block, loss_of, nn.Module.eval, **SETTINGS)
        assert same_bits(plain, ours) and any(copied) == copies
        assert all(each.recipes.get("region") for each in reports)


def test_under_a_plan(tmp_path: Any) -> None:
    plain, _ = trained(Block)
    for settings in (
        {"memory_budget": 6000},
        {"max_overhead": 0.5, "target": "ssd", "directory": str(tmp_path)},
    ):
        ours, _ = trained(Block, min_bytes=0, **settings)
        assert same_bits(plain, ours)


def test_a_plan_runs_some_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """They do already in the observed steps, for memory has an end."""
    monkeypatch.setattr(CpuDevice, "capacity_bytes", lambda device: 1)

    def states(settings: dict[str, Any]) -> list[Tensor]:
        torch.manual_seed(0)
        model, x, found = Stack(Block), torch.randn(BATCH, WIDTH, 5), []
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        session = ssdtrain.offload(model, **settings) if settings else None
        for number in range(14):
            if session is not None and session.profile is not None and number == 8:
                session.follow(some_again(session, lambda item: Placement.OFFLOAD, 2))
            loss = one_forward(model, x)
            loss.backward()
            found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
            found += [each.detach().clone() for each in model.state_dict().values()]
        if session is not None:
            last = session.steps[-1]
            assert last.recipes["region"] > 0 and last.bytes_offloaded > 0
            assert Fallback.PLAN_MISMATCH.value not in last.fallbacks
            session.close()
        return found

    settings = {"target": "host", "min_bytes": 0, "max_overhead": 0.5}
    assert same_bits(states({}), states(settings))


def test_a_buffer_that_changes_before_backward() -> None:
    """A re-run does not write to what is in its place."""

    def changed(model: nn.Module, x: Tensor) -> Tensor:
        loss = one_forward(model, x)
        for block in model.blocks:
            block.norm.running_mean = torch.full((WIDTH,), 3.0)
        return loss

    plain, _ = trained(Block, changed)
    ours, reports = trained(Block, changed, **SETTINGS)
    assert same_bits(plain, ours)
    assert all(report.recipes["region"] > 0 for report in reports)


def test_a_saved_buffer_that_changes_raises() -> None:
    """As in plain training."""

    def changed(model: nn.Module, x: Tensor) -> Tensor:
        loss = one_forward(model, x)
        for block in model.blocks:
            block.norm.running_mean.add_(1)
        return loss

    with pytest.raises(RuntimeError, match="inplace operation"):
        trained(Block, changed)
    with pytest.raises(InPlaceError):
        trained(Block, changed, **SETTINGS)


def shared(model: nn.Module) -> None:
    """Two names of one memory."""
    for block in model.blocks:
        block.norm.register_buffer("whole", torch.zeros(2 * WIDTH))
        block.norm.running_mean = block.norm.whole[:WIDTH]


class WritesAll(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        for buffer in self.buffers():
            buffer.add_(1)
        return super().forward(x)


class WithAll(Block):
    def made(self) -> nn.Module:
        return WritesAll(WIDTH)


@pytest.mark.parametrize("kind", [Block, WithAll])
def test_no_region(kind: type[Block]) -> None:
    """Copies would not share bytes."""
    plain, _ = trained(kind, prepare=shared)
    ours, reports = trained(kind, prepare=shared, **SETTINGS)
    assert same_bits(plain, ours)
    assert not any(report.recipes.get("region") for report in reports)


class Synchronized(Block):
    def made(self) -> nn.Module:
        return nn.SyncBatchNorm(WIDTH)


class PerInstance(Block):
    def made(self) -> nn.Module:
        return nn.InstanceNorm1d(WIDTH, track_running_stats=True)


class Given(Block):
    """Is given the statistics of another normalization."""

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.part(x * scale.view(-1, 1))))


class StackOfGiven(Stack):
    def __init__(self) -> None:
        super().__init__(Given)
        self.stem = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.stem.running_var.detach()[:])
            x = self.stem(x)  # and so is the next one
        return x


def test_statistics_that_are_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are updated before backward, and count no version."""
    monkeypatch.setattr(f"{__name__}.Stack", lambda kind: kind())
    plain, _ = trained(StackOfGiven)
    ours, reports = trained(StackOfGiven, **SETTINGS)
    assert same_bits(plain, ours)
    assert not any(report.recipes.get("region") for report in reports)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("kind", [Block, Drops, NoVersion, PerInstance])
def test_evaluation_and_training_before_one_backward(
    kind: type[Block], is_first: bool
) -> None:
    """The statistics that evaluation reads are updated before backward."""

    def both(model: nn.Module, x: Tensor) -> Tensor:
        found = [model.train(mode)(x + mode) for mode in (not is_first, is_first)]
        return (found[0] * found[1]).square().mean()

    plain, _ = trained(kind, both)
    ours, reports = trained(kind, both, **SETTINGS)
    assert same_bits(plain, ours)
    found = [bool(report.recipes.get("region")) for report in reports]
    assert found == [kind in KNOWN] * STEPS


@pytest.mark.parametrize("kind", [Synchronized, PerInstance])
def test_other_normalizations_are_no_regions(kind: type[Block]) -> None:
    plain, _ = trained(kind)
    ours, reports = trained(kind, **SETTINGS)
    assert same_bits(plain, ours)
    assert not any(report.recipes.get("region") for report in reports)


def test_a_second_backward_and_its_gradient() -> None:
    def grads(model: nn.Module) -> list[Tensor]:
        x = torch.ones(BATCH, WIDTH, 5, requires_grad=True)
        loss = model(x * torch.arange(5)).square().mean()
        (first,) = torch.autograd.grad(loss, x, retain_graph=True)
        (second,) = torch.autograd.grad(loss, x, create_graph=True)
        second.square().sum().backward()
        own = [p.grad.clone() for p in model.parameters()]
        return [first, second.detach(), *own, *model.buffers()]

    torch.manual_seed(0)
    plain = grads(Stack(Block))
    torch.manual_seed(0)
    model = Stack(Block)
    with ssdtrain.offload(model, **SETTINGS):
        assert same_bits(plain, grads(model))


class Frozen(Statistics):
    """A normalization whose flag is its own, and which begins to write later."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", self.mean)
        self.register_buffer("running_var", self.var)
        self.calls = [0]

    def forward(self, x: Tensor) -> Tensor:
        mean, var, writes = self.running_mean, self.running_var, FLAG[0]
        return functional.batch_norm(x, mean, var, None, None, writes)


FLAG = [False]


class OfFrozen(Block):
    def made(self) -> nn.Module:
        return Frozen()


def test_a_normalization_that_begins_to_write() -> None:
    def later(model: nn.Module, x: Tensor) -> Tensor:
        FLAG[0] = len(seen) > 2
        seen.append(0)
        return one_forward(model, x)

    seen: list[int] = []
    plain, _ = trained(OfFrozen, later)
    seen.clear()
    ours, _ = trained(OfFrozen, later, **SETTINGS)
    assert same_bits(plain, ours)
