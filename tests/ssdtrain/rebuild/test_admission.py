"""What is compared, and how often: [Note: admission]."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import ssdtrain
from ssdtrain.cache import rebuilder
from ssdtrain.errors import ConfigError
from ssdtrain.rebuild import admission
from ssdtrain.rebuild.admission import is_dense, raw, same_bytes


class Net(nn.Module):
    """GELU between two linears, on inputs of any number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.gelu(self.first(x))).sum()


def test_bytes_and_not_values() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert same_bytes(nan.clone(), nan)
    assert not same_bytes(torch.tensor([-0.0]), torch.tensor([0.0]))
    assert not same_bytes(torch.zeros(2, 3), torch.zeros(3, 2))
    assert not same_bytes(torch.zeros(2, 3), torch.zeros(3, 2).t())
    assert not same_bytes(torch.zeros(2), torch.zeros(2, dtype=torch.int32))
    assert not same_bytes(torch.zeros(3)[1:], torch.zeros(2))


@pytest.mark.parametrize("num_bytes", [0, 7, 16, 100, 160, 161])
@pytest.mark.parametrize("skip", [0, 3])
def test_bytes_are_compared_in_parts_of_words(
    monkeypatch: pytest.MonkeyPatch, num_bytes: int, skip: int
) -> None:
    """What a device needs for a comparison is small; no byte is left out."""
    monkeypatch.setattr(admission, "PART_BYTES", 32)
    equal, sizes = torch.equal, []

    def compared(one: torch.Tensor, other: torch.Tensor) -> bool:
        sizes.append(one.numel())
        assert one.nbytes <= 32
        return equal(one, other)

    monkeypatch.setattr(torch, "equal", compared)
    real = torch.arange(num_bytes, dtype=torch.uint8)
    held = bytearray(skip) + bytearray(real.tolist()) + bytearray(1)
    # Memory of somebody else may begin anywhere.
    rebuilt = torch.frombuffer(held, dtype=torch.uint8, offset=skip)[:num_bytes]
    assert rebuilt.data_ptr() % 8 == skip or not num_bytes
    monkeypatch.setattr(admission, "raw", lambda tensor: tensor)
    assert same_bytes(rebuilt, real)
    if num_bytes % 8 == 0 == rebuilt.data_ptr() % 8:
        assert sum(sizes) == num_bytes // 8
    for at in {0, num_bytes // 2, num_bytes - 1} if num_bytes else ():
        other = real.clone()
        other[at] += 1
        assert not same_bytes(rebuilt, other)


def test_without_memory_for_the_check_nothing_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tensor is stored, and the next one is asked."""
    errors: list[Exception] = [torch.OutOfMemoryError("x"), ConfigError("x")]
    compare = rebuilder.same_bytes

    def compared(*both: torch.Tensor) -> bool:
        if errors:
            raise errors.pop()
        return compare(*both)

    monkeypatch.setattr(rebuilder, "same_bytes", compared)
    net, rebuilt = Net(), []
    with ssdtrain.offload(net, target="host", plan="keep-all", min_bytes=0) as session:
        for _ in range(4):
            net(torch.randn(4, 8)).backward()
            rebuilt.append(session.last_step.bytes_recomputed > 0)
    assert rebuilt == [False, False, True, True]


@settings(deadline=None, max_examples=60)
@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    data=st.data(),
)
def test_dense_means_that_raw_bytes_are_all_of_it(
    shape: list[int], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    tensor = torch.randn(shape).permute(order)
    assert is_dense(tensor)
    again = torch.empty_strided(tensor.shape, tensor.stride()).copy_(tensor)
    assert torch.equal(raw(again), raw(tensor))
    if shape[-1] > 1:
        assert not is_dense(torch.randn(shape)[..., 1:])
    assert not is_dense(torch.randn(shape).expand(2, *shape))
