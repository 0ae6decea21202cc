"""The layer's inventory: against the literature, and against real autograd."""

import importlib.util
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdtrain.tools.project.layer import Split, operators, saved_bytes
from ssdtrain.tools.project.tables import Model


def model(hidden: int = 12288, layers: int = 1, sequence: int = 2048) -> Model:
    return Model(
        name="m",
        layers=layers,
        hidden=hidden,
        heads=max(1, hidden // 128),
        sequence=sequence,
        vocabulary=1000,
    )


def small_terms(one: Model, split: Split) -> float:
    """Log-sum-exp and norm statistics: what the 34 s b h count leaves out."""
    tokens = split.micro_batch * one.sequence
    return 4 * tokens * one.heads / split.tensor + 16 * tokens / split.outer


@pytest.mark.parametrize(
    ("split", "units"),
    [
        (Split(micro_batch=2), 34.0),
        (Split(micro_batch=2, tensor=2), 10 + 24 / 2),
        (Split(micro_batch=1, tensor=8), 10 + 24 / 8),
        (Split(micro_batch=1, tensor=8, sequence_parallel=True), 34 / 8),
    ],
)
def test_korthikanti_counts(split: Split, units: float) -> None:
    one = model()
    sbh = split.micro_batch * one.sequence * one.hidden
    found = saved_bytes(one, split) - small_terms(one, split)
    assert found == pytest.approx(units * sbh)
    without_masks = saved_bytes(one, split) - saved_bytes(one, split, 0.0)
    assert without_masks == pytest.approx(2 * sbh / split.outer)


@pytest.fixture(scope="module")
def device_recipe() -> ModuleType:
    """The benchmark's plain block: the same code that is measured on a GPU."""
    return importlib.import_module("recipes.bench.planner.project_device")


def test_real_autograd_saves_what_the_model_says(device_recipe: ModuleType) -> None:
    batch, one = 2, model(hidden=256, layers=3, sequence=64)
    blocks = [device_recipe.Block(one.hidden) for _ in range(one.layers)]
    stack = torch.nn.Sequential(*blocks).to(torch.bfloat16)
    x = torch.randn(batch, one.sequence, one.hidden, dtype=torch.bfloat16)
    with device_recipe.saved_bytes(stack) as found:
        out = stack(x)
    saved = sum(found.values())
    assert out.requires_grad
    # On a CPU dropout saves a bf16 factor, not a boolean mask: two bytes.
    estimate = one.layers * saved_bytes(one, Split(micro_batch=batch), 2.0)
    assert saved == pytest.approx(estimate, rel=0.002)


@settings(deadline=None, max_examples=50)
@given(
    batch=st.integers(1, 64),
    tensor=st.sampled_from([1, 2, 4, 8]),
    hidden=st.sampled_from([128, 1024, 8192]),
    sequence=st.integers(1, 4096),
)
def test_more_splitting_never_saves_more(
    batch: int, tensor: int, hidden: int, sequence: int
) -> None:
    one = model(hidden=hidden, sequence=sequence)
    alone = saved_bytes(one, Split(micro_batch=batch))
    divided = saved_bytes(one, Split(micro_batch=batch, tensor=tensor))
    both = Split(micro_batch=batch, tensor=tensor, sequence_parallel=True)
    assert saved_bytes(one, both) <= divided <= alone
    assert saved_bytes(one, both) == pytest.approx(alone / tensor)
    assert all(op.num_bytes > 0 for op in operators(one, both))
