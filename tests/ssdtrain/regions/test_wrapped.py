"""DTensors that autograd saves in regions: items and records as outside of them."""

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ssdtrain
from ssdtrain.cache import verify
from ssdtrain.counters import Fallback
from ssdtrain.errors import ActivationChangedError
from ssdtrain.plan.placement import Placement
from ssdtrain.plan.profile import Item
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.cache.steps import train
from tests.ssdtrain.regions.plans import some_again
from tests.ssdtrain.unseen import Owner

if not dist.is_available():
    pytest.skip("no torch.distributed", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("mesh")
WIDTH, ROWS, BLOCKS = 16, 8, 3
SETTINGS: dict[str, Any] = {
    "max_overhead": 0.01,
    "target": "host",
    "min_bytes": 1,
    "window_bytes": 1 << 12,
}
NUM_OBSERVED = 5
"""Steps before there is a profile."""


class Block(nn.Module):
    """Saves plain tensors and DTensors, one of them in two views, and some that are no
    parameters and belong to nobody."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.mesh = mesh
        self.how: Callable[[Any], Any] | None = None
        self.writes = False

    def forward(self, x: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, Shard

        spread = DTensor.from_local(self.up(x), self.mesh, [Shard(0)], run_check=False)
        half = spread.float().sigmoid() * 1.0
        if self.how is not None:
            half = self.how(half)
        if self.writes:
            _ = half * half  # saved, and saved again behind the change
            with torch.no_grad():
                half.mul_(2)
        turned = (half * half).tanh().t().contiguous().t()
        result: Tensor = x + self.down(turned.to_local())
        return result


class Net(nn.Module):
    def __init__(self, mesh: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(mesh) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def loss_of(model: nn.Module, number: int) -> Tensor:
    torch.manual_seed(100 + number)
    loss: Tensor = model(torch.randn(ROWS, WIDTH)).square().mean()
    return loss


def model_of(mesh: Any, *, writes: bool = False) -> Any:
    """writes: whether blocks change a DTensor in place."""
    model: Any = Net(mesh)
    for block in model.blocks:
        block.writes = writes
    return model


def observed(mesh: Any, recompute: str, *, writes: bool = False) -> list[Item]:
    """The items of one kind of lane, without those that serve regions alone."""
    model = model_of(mesh, writes=writes)
    with ssdtrain.offload(model, **SETTINGS, recompute=recompute) as session:
        for _ in train(model, loss_of, NUM_OBSERVED):
            pass
        assert session.profile is not None
        (items,) = session.profile.kinds.values()
    return [item for item in items if item.serves < 0 and item.owner < 0]


@pytest.mark.parametrize("writes", [False, True])
def test_what_regions_save_is_observed_as_without_them(mesh: Any, writes: bool) -> None:
    """A plan may choose that none runs again."""
    regions, none = (
        observed(mesh, recompute, writes=writes) for recompute in ("regions", "off")
    )
    assert sum(item.region >= 0 for item in regions) > 3 * BLOCKS
    names, others = (
        Counter((item.name, item.num_bytes) for item in items)
        for items in (regions, none)
    )
    assert names == others


def test_a_part_has_the_name_of_its_wrapper(mesh: Any) -> None:
    for recompute in ("regions", "off"):
        names = [item.name.split()[0] for item in observed(mesh, recompute)]
        assert {"SigmoidBackward0", "TanhBackward0", "MulBackward0"} <= set(names)


@pytest.mark.parametrize("num_rerun", range(BLOCKS + 1))
@pytest.mark.parametrize("placement", [Placement.KEEP, Placement.OFFLOAD])
def test_plans_of_wrappers_in_regions_are_followed(
    mesh: Any, placement: Placement, num_rerun: int
) -> None:
    model, num_steps = Net(mesh), NUM_OBSERVED + 4
    plain = list(train(copy.deepcopy(model), loss_of, num_steps))
    with ssdtrain.offload(model, **SETTINGS, recompute="regions") as session:
        for number, found in enumerate(train(model, loss_of, num_steps)):
            assert same_bits(found, plain[number]), number
            if number == NUM_OBSERVED:
                session.follow(some_again(session, lambda _: placement, num_rerun))
        for step in session.steps[NUM_OBSERVED:]:
            assert Fallback.PLAN_MISMATCH not in step.fallbacks
        last = session.steps[-1]
        assert bool(last.recipes.get("region")) == bool(num_rerun)
        moves = placement is Placement.OFFLOAD
        assert bool(last.bytes_offloaded) == moves


@pytest.mark.parametrize("num_rerun", [0, BLOCKS])
def test_a_wrapper_that_is_changed_and_saved_again_is_another_record(
    mesh: Any, num_rerun: int
) -> None:
    """Its part's version does not tell."""
    model, num_steps = model_of(mesh, writes=True), NUM_OBSERVED + 3
    plain = list(train(copy.deepcopy(model), loss_of, num_steps))
    with ssdtrain.offload(model, **SETTINGS, recompute="regions") as session:
        for number, found in enumerate(train(model, loss_of, num_steps)):
            assert same_bits(found, plain[number]), number
            if number == NUM_OBSERVED:
                moved = some_again(session, lambda _: Placement.OFFLOAD, num_rerun)
                session.follow(moved)


@pytest.mark.parametrize("is_planned", [False, True])
def test_a_wrapper_that_is_made_otherwise_is_told(
    is_planned: bool, mesh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The self-check looks at the part of a wrapper."""
    monkeypatch.setattr(verify, "SELF_CHECK_PERIOD", 1)
    model, factor = Net(mesh), Owner(1.0)
    unseen = factor.proxy()
    for block in model.blocks:
        block.how = lambda half: half * unseen.value
    num_steps = NUM_OBSERVED + 3 if is_planned else 1
    with ssdtrain.offload(model, **SETTINGS, recompute="regions") as session:
        for number, _ in enumerate(train(model, loss_of, num_steps)):
            if number == NUM_OBSERVED:
                session.follow(some_again(session, lambda _: Placement.KEEP))
        last = session.last_step
        assert last is not None and last.num_verified > 3 * BLOCKS
        loss = loss_of(model, 0)
        factor.value = -1.0  # its square is the same: a DTensor alone is another
        with pytest.raises(ActivationChangedError, match=r"made again by blocks\.2"):
            loss.backward()
