"""[Note: identity]: each simpler rule gives wrong gradients in one of these."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ssdtrain.cache.identity import identify, raw_bytes
from tests.ssdtrain.bits import same_bits

Run = Callable[..., Any]


def same(
    function: Callable[..., Tensor], inputs: list[Tensor], run: Run, settings: Any
) -> Any:
    theirs, _ = run(function, inputs)
    ours, reports = run(function, inputs, settings)
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert same_bits(a, b)
    return reports[-1]


def test_version_is_part_of_the_key(gradients: Run, everything: Any) -> None:
    """One record per storage gives [2, 4] here instead of [4, 6]."""

    def function(_: nn.Module, x: Tensor) -> Tensor:
        y = x * 1
        y * y
        y.add_(1)
        return (y * y).sum()

    x = torch.tensor([1.0, 2.0], requires_grad=True)
    ours, _ = gradients(function, [x], everything)
    assert ours[0].tolist() == [4.0, 6.0]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extent_is_part_of_the_key(
    kind: type[nn.Module], dtype: torch.dtype, gradients: Run, everything: Any
) -> None:
    """Recurrent layers use unsafe_chunk: one storage, several version counters."""
    torch.manual_seed(0)
    layer = kind(8, 8, num_layers=2).to(dtype)

    def function(_: nn.Module, x: Tensor) -> Tensor:
        return layer(x)[0].square().sum()

    x = torch.randn(5, 3, 8, dtype=dtype, requires_grad=True)
    same(function, [x], gradients, everything)


def test_unsafe_chunks_are_different_records(gradients: Run, everything: Any) -> None:
    def function(_: nn.Module, x: Tensor) -> Tensor:
        first, second = torch.unsafe_chunk(x * 2, 2)
        first, second = first.sigmoid_(), second.tanh_()
        return (first * second).sum()

    x = torch.randn(64, requires_grad=True)
    report = same(function, [x], gradients, everything)
    assert report.num_records >= 2


def test_views_of_one_base_share_one_record(gradients: Run, everything: Any) -> None:
    def function(_: nn.Module, x: Tensor) -> Tensor:
        y = x.exp()
        return (y * y.t().contiguous().t()).sum() + (y[1:] * y[:-1]).sum()

    x = torch.randn(32, 32, requires_grad=True)
    report = same(function, [x], gradients, everything)
    # exp's result (with both of its slices) and the transposed copy.
    assert report.num_records == 2
    assert report.bytes_saved == 2 * 32 * 32 * 4


def test_raw_bytes_cover_the_base() -> None:
    base = torch.arange(100, dtype=torch.float32, requires_grad=True) * 1
    part = base[10:20]
    key, view = identify(part)
    assert (key.start_byte, key.end_byte) == (0, 400)
    assert view.offset_bytes == 40
    assert same_bits(view.rebuild(raw_bytes(part, key).clone()), part)
