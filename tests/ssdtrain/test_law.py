"""The first law: gradients are bitwise equal to the run without ssdtrain.

The same file runs on the CPU and, with `-m gpu`, on a CUDA device.
"""

import functools
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ssdtrain
from ssdtrain.counters import StepReport
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.targets import STAGED, TARGETS, settings_of
from tests.ssdtrain.tiny_models import gpt2

pytestmark = pytest.mark.usefixtures("deterministic")

NUM_STEPS = 4
SEQUENCE = 16
VOCABULARY = 64


@dataclass(frozen=True)
class Cell:
    """One combination of the law's table."""

    checkpointing: str
    num_micro_batches: int
    precision: str
    device: str


@dataclass(frozen=True)
class Outcome:
    """Everything the law compares, and the reports."""

    losses: list[Tensor]
    gradients: list[Tensor]
    parameters: list[Tensor]
    reports: list[StepReport]


def checkpointed(
    inner: Callable[..., Tensor], reentrant: bool
) -> Callable[..., Tensor]:
    def forward(hidden: Tensor, *args: object, **kwargs: object) -> Tensor:
        def run(x: Tensor) -> Tensor:
            return inner(x, *args, **kwargs)

        return checkpoint(run, hidden, use_reentrant=reentrant)

    return forward


def build(cell: Cell) -> nn.Module:
    torch.manual_seed(0)
    model = gpt2(3, 32, SEQUENCE, VOCABULARY).to(cell.device).train()
    if cell.precision == "pure bf16":
        model = model.to(torch.bfloat16)
    if cell.checkpointing != "none":
        reentrant = cell.checkpointing == "reentrant"
        for block in model.transformer.h:
            block.forward = checkpointed(block.forward, reentrant)
    return model


def precision(cell: Cell) -> AbstractContextManager[object]:
    dtypes = {"bf16 autocast": torch.bfloat16, "fp16 scaler": torch.float16}
    if cell.precision not in dtypes:
        return nullcontext()
    return torch.autocast(cell.device, dtypes[cell.precision])


def train(cell: Cell, settings: dict[str, object] | None) -> Outcome:
    model = build(cell)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaling = cell.precision == "fp16 scaler"
    scaler = torch.amp.GradScaler(cell.device, init_scale=128.0, enabled=scaling)
    session = None if settings is None else ssdtrain.offload(model, **settings)
    losses, gradients = [], []
    torch.manual_seed(1)
    for _ in range(NUM_STEPS):
        for _ in range(cell.num_micro_batches):
            tokens = torch.randint(0, VOCABULARY, (2, SEQUENCE)).to(cell.device)
            with precision(cell):
                loss = model(input_ids=tokens, labels=tokens).loss
            if session is not None and not losses:
                # A backward that overtakes its writes cancels them: not this one.
                session.cache.offloader.wait_io()
            scaler.scale(loss).backward()
            losses.append(loss.detach())
        gradients += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    reports = []
    if session is not None:
        reports = list(session.steps)
        session.close()
    return Outcome(losses, gradients, [p.detach() for p in model.parameters()], reports)


@functools.cache
def reference(cell: Cell) -> Outcome:
    return train(cell, None)


def check(cell: Cell, settings: dict[str, object]) -> None:
    ours, theirs = train(cell, settings), reference(cell)
    assert same_bits(ours.losses, theirs.losses)
    assert same_bits(ours.gradients, theirs.gradients)
    assert same_bits(ours.parameters, theirs.parameters)
    assert len(ours.reports) == NUM_STEPS
    for report in ours.reports:
        one_lane = report.bytes_saved / cell.num_micro_batches
        assert report.bytes_offloaded > 0.5 * report.bytes_saved
        assert report.bytes_reloaded > 0
        assert report.saved_backward_start_bytes < 0.7 * one_lane
    if settings["target"] in STAGED:
        assert sum(report.bytes_written for report in ours.reports) > 0


ON_A_GPU = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=ON_A_GPU)]
COLUMNS = (
    TARGETS,
    ["none", "reentrant", "non-reentrant"],
    [1, 4],
    ["fp32", "bf16 autocast", "pure bf16", "fp16 scaler"],
)
PLACES = list(itertools.product(*(range(len(column)) for column in COLUMNS)))
CELLS = list(itertools.product(*COLUMNS))
TABLE = [
    *(
        (*cell, "cpu")
        for cell, at in zip(CELLS, PLACES, strict=True)
        if sum(at) % 4 == 0
    ),
    *(pytest.param(*cell, "cuda", marks=ON_A_GPU) for cell in CELLS),
]
"""On a GPU every cell, on the CPU every pair of two columns."""


@pytest.mark.parametrize(
    ("target", "checkpointing", "num_micro_batches", "kind", "device"), TABLE
)
def test_bitwise_law(
    tmp_path: Path,
    target: str,
    checkpointing: str,
    num_micro_batches: int,
    kind: str,
    device: str,
) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    settings: dict[str, object] = {
        **settings_of(target, tmp_path),
        "min_bytes": 0,
        "plan": "offload-all",
        "recompute": "off",
        "window_bytes": 1,
        "host_bytes": 64 * 1024 * 1024,
    }
    check(Cell(checkpointing, num_micro_batches, kind, device), settings)
    assert not list(tmp_path.iterdir()), "files left behind"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("verify", ["checksum", "shadow"])
@pytest.mark.parametrize("checkpointing", ["none", "non-reentrant"])
def test_bitwise_law_under_verify(verify: str, checkpointing: str, device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    settings: dict[str, object] = {
        "target": "host",
        "min_bytes": 0,
        "plan": "offload-all",
        "window_bytes": 1,
        "verify": verify,
    }
    cell = Cell(checkpointing, 1, "bf16 autocast", device)
    ours, theirs = train(cell, settings), reference(cell)
    assert same_bits(ours.losses, theirs.losses)
    assert same_bits(ours.gradients, theirs.gradients)
    assert same_bits(ours.parameters, theirs.parameters)
    assert len(ours.reports) == NUM_STEPS
    assert all(report.num_verified > report.num_records for report in ours.reports)
