"""Trainable rows: what `torch.nn.Embedding(sparse=True)` gives, byte for byte."""

import copy
from typing import Any

import pytest
import torch

from pydirect.tiering import TieredEmbedding, plan_tiers

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# torch's own sparse Adagrad has it said.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")
OPTIMIZERS: list[tuple[Any, dict[str, float]]] = [
    (torch.optim.SGD, {"lr": 0.3}),
    (torch.optim.SparseAdam, {"lr": 0.1}),
    (torch.optim.Adagrad, {"lr": 0.2}),
]


def pair(near: int = 6) -> tuple[TieredEmbedding, torch.nn.Embedding]:
    start = torch.randn(30, 8, generator=torch.Generator().manual_seed(1))
    mine = TieredEmbedding(
        start, torch.arange(30.0), device=DEVICE, budget_bytes=near * 32
    )
    theirs = torch.nn.Embedding(30, 8, sparse=True, _weight=start.clone())
    return mine, theirs


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
@pytest.mark.parametrize("near", [0, 6, 30])
def test_training_equals_torch(kind: Any, options: dict[str, float], near: int) -> None:
    mine, theirs = pair(near)
    ours = mine.sparse_optimizer(kind, **options)
    stock = kind(theirs.parameters(), **options)
    generator = torch.Generator().manual_seed(2)
    for step in range(8):
        # Twice in a step, with repeats, hot rows and cold ones.
        index = torch.randint(0, 30, (2, 9), generator=generator)
        scale = torch.randn(2, 9, 8, generator=generator)
        for model, optimizer, device in (
            (mine, ours, DEVICE),
            (theirs, stock, torch.device("cpu")),
        ):
            optimizer.zero_grad()
            rows = model(index.to(device))
            assert rows.shape == (2, 9, 8) and rows.device.type == device.type
            (rows * scale.to(device)).sin().sum().backward()
        assert mine.weight.grad is not None and mine.weight.grad.is_sparse
        ours.step()
        stock.step()
        assert torch.equal(mine.weight, theirs.weight), step
        every = torch.arange(30)
        assert torch.equal(mine(every.to(DEVICE)).cpu(), theirs(every)), step
    assert mine.num_full_refreshes == 0


def test_a_change_that_nobody_announced_is_seen() -> None:
    mine, _ = pair()
    with torch.no_grad():
        mine.weight.add_(1)
    every = torch.arange(30, device=DEVICE)
    assert torch.equal(mine(every).cpu(), mine.weight)
    assert mine.num_full_refreshes == 1
    optimizer = mine.sparse_optimizer(torch.optim.SGD, lr=0.1)
    mine(every[:3]).sum().backward()
    with torch.no_grad():
        mine.weight[29] = 5.0  # between backward and step: another row, a hot one
    optimizer.step()
    assert torch.equal(mine(every).cpu(), mine.weight)
    assert mine.num_full_refreshes == 2
    foreign = torch.optim.SGD([mine.weight], lr=0.1)
    mine(every[-3:]).sum().backward()
    foreign.step()
    assert torch.equal(mine(every).cpu(), mine.weight)


def test_a_step_without_a_gradient() -> None:
    mine, _ = pair()
    optimizer = mine.sparse_optimizer(torch.optim.SGD, lr=0.1)
    optimizer.step()
    assert torch.equal(mine(torch.arange(30, device=DEVICE)).cpu(), mine.weight)


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, "momentum"),
        (torch.optim.Adagrad, {"lr": 0.1, "weight_decay": 0.9}, "weight_decay"),
        (torch.optim.AdamW, {"lr": 0.1}, "got AdamW"),
    ],
)
def test_optimizers_that_change_other_rows_are_refused(
    kind: Any, options: dict[str, float], said: str
) -> None:
    mine, _ = pair()
    with pytest.raises(ValueError, match=said):
        mine.sparse_optimizer(kind, **options)


def test_rows_cannot_be_spread() -> None:
    plan = plan_tiers(30, 32, replicated_bytes=0, spread_bytes=32, num_gpus=2)
    with pytest.raises(ValueError, match="shares"):
        TieredEmbedding(torch.zeros(30, 8), None, device=DEVICE, plan=plan)


def test_a_step_with_a_closure() -> None:
    """The gradient is computed inside the step: what changed is known behind it."""
    mine, theirs = pair()
    every = torch.arange(30)
    for model, optimizer in (
        (mine, mine.sparse_optimizer(torch.optim.SGD, lr=0.5)),
        (theirs, torch.optim.SGD(theirs.parameters(), lr=0.5)),
    ):

        def closure(model: Any = model, optimizer: Any = optimizer) -> float:
            optimizer.zero_grad()
            loss = model(every.to(DEVICE if model is mine else "cpu")).square().sum()
            loss.backward()
            return float(loss.detach())

        for _ in range(3):
            optimizer.step(closure)
    assert torch.equal(mine(every.to(DEVICE)).cpu(), theirs(every))
    assert torch.equal(mine.weight, theirs.weight) and mine.num_full_refreshes == 0


def test_a_gradient_that_is_dense() -> None:
    mine, _ = pair()
    optimizer = mine.sparse_optimizer(torch.optim.SGD, lr=0.5)
    every = torch.arange(30, device=DEVICE)
    (mine(every[:3]).sum().cpu() + mine.weight.square().sum()).backward()
    optimizer.step()
    assert torch.equal(mine(every).cpu(), mine.weight)


def test_a_model_around_it_is_moved_and_copied() -> None:
    mine, _ = pair()
    every = torch.arange(30, device=DEVICE)
    model = torch.nn.Sequential(mine, torch.nn.Linear(8, 2)).to(DEVICE)
    assert mine.weight.device.type == "cpu" and mine.num_full_refreshes == 0
    with pytest.raises(ValueError, match=r"keep its torch.float32, got torch.float64"):
        model.double()
    copied = copy.deepcopy(mine)
    replaced, _ = pair()
    replaced.load_state_dict({"weight": torch.ones(30, 8)}, assign=True)
    for other in (copied, replaced):
        with torch.no_grad():
            other.weight.mul_(3)
        assert torch.equal(other(every).cpu(), other.weight)
        other(every).sum().backward()
        torch.optim.SGD(other.parameters(), lr=0.1).step()
        assert torch.equal(other(every).cpu(), other.weight)
    assert torch.equal(mine(every).cpu(), pair()[0].weight)
    replaced.weight = torch.nn.Parameter(torch.ones(30, 9))
    with pytest.raises(ValueError, match=r"shape \[30, 8\] .* got .* \[30, 9\]"):
        replaced(every)
    with pytest.raises(ValueError, match=r"floating point, got torch\.int64"):
        TieredEmbedding(torch.ones(3, 1).long(), None, device=DEVICE)
