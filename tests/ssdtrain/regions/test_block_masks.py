"""Layers that are given a mask of flex attention."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import ssdtrain
from ssdtrain.errors import InPlaceError, RegionError
from ssdtrain.regions.arguments import has_marks
from tests.ssdtrain.bits import same_bits

masks = pytest.importorskip("transformers.masking_utils")
LENGTH = 32
SETTINGS: dict[str, Any] = {
    **{"plan": "keep-all", "recompute": "regions", "min_bytes": 0, "target": "host"}
}


def of_program(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """What a program wrote itself may read what changes."""
    return q >= k


def made(mask_mod: Callable[..., Tensor]) -> BlockMask:
    return create_block_mask(mask_mod, 2, None, LENGTH, LENGTH, device="cpu")


class Layer(nn.Module):
    """Attention with the mask, which has a backward on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor, *, mask: BlockMask) -> Tensor:
        at = torch.arange(LENGTH)
        rows = torch.arange(2)[:, None, None, None]
        allowed = mask.mask_mod(rows, torch.tensor(0), at[:, None], at)
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        attention = nn.functional.scaled_dot_product_attention
        return x + attention(q, k, v, attn_mask=allowed.expand(2, 1, -1, -1))[:, 0]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask=mask)
        return x.square().mean()


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def documents() -> Tensor:
    return torch.arange(LENGTH).div(5, rounding_mode="floor").expand(2, -1).clone()


def packed(ids: Tensor) -> BlockMask:
    same = masks.packed_sequence_mask_function(ids)
    return made(masks.and_masks(masks.causal_mask_function, same))


def test_they_run_again() -> None:
    x = torch.randn(2, LENGTH, 16)
    plain, ours = net(), net()
    plain(x, packed(documents())).backward()
    with ssdtrain.offload(ours, **SETTINGS) as session:
        for _ in range(2):
            ours.zero_grad()
            ours(x, packed(documents())).backward()
    for mine, other in zip(ours.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None and other.grad is not None
        assert same_bits(mine.grad, other.grad)
    report = session.steps[0]
    assert report.bytes_recomputed > 0 and not report.fallbacks


def test_an_empty_type_of_spmd_types_is_as_good_as_none() -> None:
    x: Any = torch.randn(2)
    x._local_type = {}
    assert not has_marks(x)
    x._local_type = {"dp": 1}
    assert has_marks(x)


def test_a_function_of_the_program_is_not_trusted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    x, model = torch.randn(2, LENGTH, 16), net()
    with ssdtrain.offload(model, **SETTINGS):
        model(x, made(of_program)).backward()
    assert "type BlockMask may change" in caplog.text


def test_a_change_in_backward_is_found() -> None:
    x, model, ids = torch.randn(2, LENGTH, 16), net(), documents()
    with ssdtrain.offload(model, **SETTINGS):
        loss = model(x, packed(ids))
        ids.add_(1)  # the function reads it
        with pytest.raises(InPlaceError, match="inplace operation"):
            loss.backward()
        mask = packed(ids)
        loss = model(x, mask)
        mask.mask_mod = masks.causal_mask_function
        with pytest.raises(RegionError, match="BlockMask"):
            loss.backward()
        ids = documents()
        loss = model(x, packed(ids))
        ids.data = torch.zeros_like(ids)
        with pytest.raises(RegionError, match="BlockMask"):
            loss.backward()


class Noting(Layer):
    """Writes something down in the mask."""

    def forward(self, x: Tensor, *, mask: BlockMask) -> Tensor:
        mask.noted = 1 + getattr(mask, "noted", 0)  # type: ignore[attr-defined]
        return super().forward(x, mask=mask)


class Replacing(Layer):
    """Has the next layer attend to other rows."""

    def forward(self, x: Tensor, *, mask: BlockMask) -> Tensor:
        x = super().forward(x, mask=mask)
        mask.mask_mod = masks.causal_mask_function
        return x


@pytest.mark.parametrize("kind", [Noting, Replacing])
def test_a_layer_that_changes_its_mask_runs_once(kind: type[Layer]) -> None:
    x, found = torch.randn(2, LENGTH, 16), []
    for settings in (SETTINGS, SETTINGS | {"recompute": "off"}):
        model = net()
        torch.manual_seed(1)
        model.layers = nn.ModuleList(kind() for _ in range(3))
        with ssdtrain.offload(model, **settings):
            model(x, packed(documents())).backward()
        found.append([each.grad for each in model.parameters()])
    for mine, other in zip(*found, strict=True):
        assert mine is not None and other is not None and same_bits(mine, other)
