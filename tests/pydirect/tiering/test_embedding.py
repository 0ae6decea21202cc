"""Trainable rows: what `torch.nn.Embedding(sparse=True)` gives, byte for byte."""

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
