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
from tests.ssdtrain.unseen import Owner

WIDTH, STEPS = 8, 4
SETTINGS: dict[str, Any] = {"recompute": "regions", "plan": "keep-all", "min_bytes": 0}


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("number", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        return x * self.number.clone()


class Block(nn.Module):
    def __init__(self, root: "Model") -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.knows(root)

    def knows(self, root: "Model") -> None:
        self.others: Any = [root]

    def touch(self, x: Tensor) -> Tensor:
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
    def touch(self, x: Tensor) -> Tensor:
        return x * self.others[0].scale  # type: ignore[no-any-return]


class CallsNorm(Block):
    def touch(self, x: Tensor) -> Tensor:
        return self.others[0].stem(x)  # type: ignore[no-any-return]


class CallsCounter(Block):
    def touch(self, x: Tensor) -> Tensor:
        return self.others[0].counter(x)  # type: ignore[no-any-return]


class Moves(Block):
    def touch(self, x: Tensor) -> Tensor:
        self.others[0].offset.add_(1)
        return x * self.others[0].offset.clone()  # type: ignore[no-any-return]


class ReadsNorm(Block):
    def touch(self, x: Tensor) -> Tensor:
        return x * self.others[0].stem.running_var.mean()  # type: ignore[no-any-return]


class ReadsUnseen(Block):
    def knows(self, root: Model) -> None:
        self.owner = Owner(root.stem)
        self.others = self.owner.proxy()

    def touch(self, x: Tensor) -> Tensor:
        return x * self.others.value.running_var.mean()  # type: ignore[no-any-return]


class CallsWeak(Block):
    def knows(self, root: Model) -> None:
        self.others = weakref.ref(root)

    def touch(self, x: Tensor) -> Tensor:
        return self.others().stem(x)  # type: ignore[no-any-return]


class CallsUnregistered(Block):
    """A normalization that has its place elsewhere."""

    def knows(self, root: Model) -> None:
        self.others = [root.stem]

    def touch(self, x: Tensor) -> Tensor:
        return self.others[0](x)  # type: ignore[no-any-return]


class OtherName(Block):
    def knows(self, root: Model) -> None:
        self.kept = root.stem.running_var

    def touch(self, x: Tensor) -> Tensor:
        return x * self.kept.mean()


class OfBuffer(OtherName):
    def knows(self, root: Model) -> None:
        assert root.stem.running_var is not None
        self.register_buffer("kept", root.stem.running_var[:])


class ReadsOffset(Block):
    def touch(self, x: Tensor) -> Tensor:
        return x * self.others[0].offset.clone()  # type: ignore[no-any-return]


class ReadsNumber(Block):
    def touch(self, x: Tensor) -> Tensor:
        return x * self.others[0].counter.number.clone()  # type: ignore[no-any-return]


def trained(kind: type[Block], *, offloads: bool) -> tuple[list[Tensor], Any]:
    torch.manual_seed(0)
    model = Model(kind)
    session = ssdtrain.offload(model, **SETTINGS)
    if not offloads:
        session.close()
    optimizer, found = torch.optim.SGD(model.parameters(), 0.05), []
    for _ in range(STEPS):
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


@pytest.mark.parametrize("kind", [ReadsOffset, ReadsNumber])
def test_what_is_outside_and_changes_before_backward_is_an_error(
    kind: type[Block],
) -> None:
    with pytest.raises(RegionError, match="something inside its attribute others"):
        trained(kind, offloads=True)
