"""A region that reads or updates what modules outside of it hold: it runs once, or says
what has changed; compared with plain training, to the bit."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ssdtrain
from ssdtrain.errors import RegionError
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.regions.test_updated import Counter
from tests.ssdtrain.unseen import Owner

WIDTH, STEPS = 8, 4
SETTINGS: dict[str, Any] = {"recompute": "regions", "plan": "keep-all", "min_bytes": 0}


class Block(nn.Module):
    def __init__(self, root: "Model") -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.knows(root)

    def knows(self, root: "Model") -> None:
        self.others: Any = [root]

    def touch(self, x: Tensor) -> Any:
        """It knows the model, and asks for an attribute alone."""
        return x * self.others[0].rate

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.sin(self.up(self.touch(x))))


class Model(nn.Module):
    """It changes everything that its blocks may read before backward comes."""

    def __init__(self, kind: type[Block]) -> None:
        super().__init__()
        self.stem, self.counter, self.rate = nn.BatchNorm1d(WIDTH), Counter(), 1.0
        self.register_buffer("offset", torch.ones(()))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(kind(self) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            self.rate = self.rate * 0.9 + 0.2
            x = self.stem(self.counter(block(x)))
            self.offset += 1
        return x


class Scaled(Block):
    def touch(self, x: Tensor) -> Any:
        return x * self.others[0].scale


class CallsNorm(Block):
    def touch(self, x: Tensor) -> Any:
        return self.others[0].stem(x)


class CallsCounter(Block):
    def touch(self, x: Tensor) -> Any:
        return self.others[0].counter(x)


class Moves(Block):
    def touch(self, x: Tensor) -> Any:
        self.others[0].offset.add_(1)
        return x * self.others[0].offset.clone()


class ReadsNorm(Block):
    def touch(self, x: Tensor) -> Any:
        return x * self.others[0].stem.running_var.mean()


class ReadsUnseen(Block):
    def knows(self, root: Model) -> None:
        self.owner = Owner(root.stem)
        self.others = self.owner.proxy()

    def touch(self, x: Tensor) -> Any:
        return x * self.others.value.running_var.mean()


class CallsWeak(Block):
    def knows(self, root: Model) -> None:
        self.others = weakref.ref(root)

    def touch(self, x: Tensor) -> Any:
        return self.others().stem(x)


class CallsUnregistered(Block):
    """A normalization that has its place elsewhere."""

    def knows(self, root: Model) -> None:
        self.others = [root.stem]

    def touch(self, x: Tensor) -> Any:
        return self.others[0](x)


class OtherName(Block):
    def knows(self, root: Model) -> None:
        self.kept = root.stem.running_var

    def touch(self, x: Tensor) -> Any:
        return x * self.kept.mean()


class OfBuffer(OtherName):
    def knows(self, root: Model) -> None:
        assert root.stem.running_var is not None
        self.register_buffer("kept", root.stem.running_var[:])


class ReadsOffset(Block):
    def touch(self, x: Tensor) -> Any:
        return x * self.others[0].offset.clone()


class ReadsNumber(Block):
    def touch(self, x: Tensor) -> Any:
        return x * self.others[0].counter.number.clone()


def trained(
    kind: type[Block], *, offloads: bool, num_frozen: int = 0
) -> tuple[list[Tensor], Any]:
    """num_frozen: first steps, in which the model's normalization is frozen."""
    torch.manual_seed(0)
    model = Model(kind)
    model.stem.train(not num_frozen)
    session = ssdtrain.offload(model, **SETTINGS)
    if not offloads:
        session.close()
    optimizer, found = torch.optim.SGD(model.parameters(), 0.05), []
    for step in range(STEPS):
        model.stem.train(step >= num_frozen)
        loss = model(torch.randn(6, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.detach(), *(x.clone() for x in model.state_dict().values())]
    session.close()
    return found, session.steps


RUN_ONCE = [CallsNorm, CallsCounter, Moves, ReadsNorm, ReadsUnseen, CallsWeak]
RUN_ONCE += [CallsUnregistered, OtherName, OfBuffer]


@pytest.mark.parametrize("kind", [Block, Scaled, *RUN_ONCE])
def test_what_is_outside_is_updated_once(kind: type[Block]) -> None:
    plain, _ = trained(kind, offloads=False)
    ours, reports = trained(kind, offloads=True)
    assert same_bits(plain, ours)
    found = [report.recipes.get("region", 0) > 0 for report in reports]
    assert found == [kind not in RUN_ONCE] * STEPS


@pytest.mark.parametrize("kind", [ReadsNorm, ReadsUnseen, OtherName, OfBuffer])
def test_statistics_outside_that_are_frozen_at_first(kind: type[Block]) -> None:
    """Nobody tells a region when they are updated again."""
    plain, _ = trained(kind, offloads=False, num_frozen=2)
    ours, _ = trained(kind, offloads=True, num_frozen=2)
    assert same_bits(plain, ours)


@pytest.mark.parametrize("kind", [ReadsOffset, ReadsNumber])
def test_what_is_outside_and_changes_before_backward_is_an_error(
    kind: type[Block],
) -> None:
    with pytest.raises(RegionError, match="something inside its attribute others"):
        trained(kind, offloads=True)
