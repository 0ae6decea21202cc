"""The layer's inventory: against the literature, and against real autograd."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdtrain.tools.project.assumptions import Assumptions
from ssdtrain.tools.project.cases import bert
from ssdtrain.tools.project.layer import Split, operators, saved_bytes
from ssdtrain.tools.project.model import Case, layer_seconds
from ssdtrain.tools.project.tables import GPUS, TransformerShape, find_row


def model(
    hidden: int = 12288, layers: int = 1, sequence: int = 2048
) -> TransformerShape:
    return TransformerShape(
        name="m",
        layers=layers,
        hidden=hidden,
        heads=max(1, hidden // 128),
        sequence=sequence,
        vocabulary=1000,
    )


def small_terms(one: TransformerShape, split: Split) -> float:
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


HEAD_SIZE, DROPOUT = 128, 0.1


class Block(torch.nn.Module):
    """A pre-LN transformer block: [batch, sequence, hidden] to the same shape.

    No dropout inside attention: on a CPU that would turn the fused kernel off.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = hidden // HEAD_SIZE
        self.norm_attention = torch.nn.LayerNorm(hidden)
        self.qkv = torch.nn.Linear(hidden, 3 * hidden)
        self.projection = torch.nn.Linear(hidden, hidden)
        self.norm_mlp = torch.nn.LayerNorm(hidden)
        self.up = torch.nn.Linear(hidden, 4 * hidden)
        self.down = torch.nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention and MLP, each behind a layer norm and before a dropout."""
        batch, sequence, hidden = x.shape
        parts = self.qkv(self.norm_attention(x)).chunk(3, dim=-1)
        q, k, v = (
            part.view(batch, sequence, self.heads, HEAD_SIZE).transpose(1, 2)
            for part in parts
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(batch, sequence, hidden)
        x = x + F.dropout(self.projection(mixed), DROPOUT, self.training)
        inner = F.gelu(self.up(self.norm_mlp(x)))
        return x + F.dropout(self.down(inner), DROPOUT, self.training)


@contextmanager
def saved_by_autograd(model: torch.nn.Module) -> Iterator[dict[int, int]]:
    """Bytes of each distinct storage saved for backward (key: its address)."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            # Everything saved stays alive in the graph, so addresses are distinct.
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


def test_real_autograd_saves_what_the_model_says() -> None:
    batch, one = 2, model(hidden=256, layers=3, sequence=64)
    blocks = [Block(one.hidden) for _ in range(one.layers)]
    stack = torch.nn.Sequential(*blocks).to(torch.bfloat16)
    x = torch.randn(batch, one.sequence, one.hidden, dtype=torch.bfloat16)
    with saved_by_autograd(stack) as found:
        out = stack(x)
    saved = sum(found.values())
    assert out.requires_grad
    # On a CPU dropout saves a bf16 factor, not a boolean mask: two bytes.
    estimate = one.layers * saved_bytes(one, Split(micro_batch=batch), 2.0)
    assert saved == pytest.approx(estimate, rel=0.002)


@pytest.mark.parametrize(
    ("hidden", "layers", "gb", "forward_ms", "backward_ms"),
    [
        (12288, 3, 20.5550, 274.93, 552.75),
        (8192, 4, 18.2714, 167.06, 343.54),
        (16384, 2, 18.2709, 320.20, 657.12),
    ],
)
def test_what_an_h200_took(
    hidden: int, layers: int, gb: float, forward_ms: float, backward_ms: float
) -> None:
    """Plain blocks, batch 16, sequence 1024, measured on 2026-11-21."""
    case = Case(
        name="device",
        model=replace(bert(hidden, layers), sequence=1024),
        gpu=find_row(GPUS, "h200-sxm", "GPU"),
        gpus=1,
        batch=16,
        micro_batch=16,
        tflops=669.36,  # of products at length, in the same run
    )
    estimate = layers * saved_bytes(case.model, case.split())
    assert 1e9 * gb == pytest.approx(estimate, rel=0.02)
    forward = 1e3 * layers * layer_seconds(case, Assumptions())
    assert forward == pytest.approx(forward_ms, rel=0.25)
    assert backward_ms / forward_ms == pytest.approx(2.0, rel=0.25)


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
