"""[Note: digest]: what it must see, and what it must not take."""

import pytest
import torch
from torch import Tensor

from ssdtrain.cache.digest import (
    ROW_WORDS,
    Digests,
    as_rows,
    chunks,
    elements,
    word_bytes,
)

DIGESTS = Digests(torch.device("cpu"))


def digest(tensor: Tensor) -> int:
    return int(DIGESTS.of(tensor, word_bytes(tensor)))


@pytest.mark.parametrize("num_bytes", [1, 2, 7, 8, 4096, 131064, 262131, 1 << 20])
@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_every_single_bit_counts(num_bytes: int, place: float) -> None:
    torch.manual_seed(0)
    data = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    before = digest(data)
    at = round(place * (num_bytes - 1))
    for bit in range(8):
        data[at] ^= 1 << bit
        assert digest(data) != before
        data[at] ^= 1 << bit
    assert digest(data) == before


@pytest.mark.parametrize("block", [512, 4096, 65536, 1 << 20])
def test_swapped_blocks_count(block: int) -> None:
    torch.manual_seed(0)
    data = torch.randint(0, 256, (4 << 20,), dtype=torch.uint8)
    before = digest(data)
    last = len(data) - block
    for at in {block, len(data) // 2, last}:
        swapped = data.clone()
        swapped[:block], swapped[at : at + block] = (
            data[at : at + block],
            data[:block],
        )
        assert digest(swapped) != before


def test_zeroed_tail_counts() -> None:
    data = torch.ones(ROW_WORDS * 3 + 5)
    before = digest(data)
    data[-1] = 0
    assert digest(data) != before


VIEWS = [
    lambda x: x,
    lambda x: x.t(),
    lambda x: x[3:, 1:],
    lambda x: x[::2],
    lambda x: x[1:].reshape(-1)[1:],
    lambda x: x[0, 0].expand(100, 100),
    lambda x: x.as_strided((5, 9), (1, 1), 3),
    lambda x: x[0:0],
    lambda x: x.view(-1, 6)[:, 1:5],
    lambda x: x.view(2, 256, 6)[..., :4].transpose(0, 1),
    lambda x: x.unflatten(0, (8, 1, 8)).permute(2, 0, 1, 3),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.complex64]


def test_rows_with_gaps_are_not_copied() -> None:
    """Query of a fused projection: every row of it in its place."""
    torch.manual_seed(0)
    fused = torch.randn(2, 256, 3, 4, 8, dtype=torch.bfloat16)
    query = fused[:, :, 0].transpose(1, 2)
    rows = as_rows(elements(query))
    assert rows is not None
    assert rows.shape == (512, 32)
    assert rows.untyped_storage().data_ptr() == fused.untyped_storage().data_ptr()
    before = digest(query)
    fused[:, :, 1:] = 0
    assert digest(query) == before
    for other in (1, 16, 64, 255):
        copy = fused.clone()
        copy[0, 0], copy[0, other] = fused[0, other], fused[0, 0]
        assert digest(copy[:, :, 0].transpose(1, 2)) != before


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_copy_has_the_same_digest(view: object, dtype: torch.dtype) -> None:
    """A copy at another address, and for every layout; a changed element shows."""
    torch.manual_seed(0)
    base = (torch.randn(64, 48) * 50).to(dtype)
    copy = base.clone()
    here, there = view(base), view(copy)  # type: ignore[operator]
    word = word_bytes(here)
    before = int(DIGESTS.of(here, word))
    assert int(DIGESTS.of(there, word)) == before
    if there.numel():
        changed = there.as_strided((1,), (1,), there.storage_offset())
        changed.copy_(changed + 1)
        assert int(DIGESTS.of(there, word)) != before


def test_bytes_outside_the_view_do_not_count() -> None:
    base = torch.randn(64, 48)
    view = base[:, :10]
    before = digest(view)
    base[:, 10:] = 0
    assert digest(view) == before


def test_hidden_bits_are_not_bytes() -> None:
    z = torch.randn(9, dtype=torch.complex64)
    assert digest(z.conj()) == digest(z)
    assert digest(z.conj().imag) == digest(z.imag)


def test_broadcast_is_not_materialised() -> None:
    huge = torch.ones(1).expand(1 << 40)
    assert elements(huge).numel() == 1
    assert digest(huge) == digest(torch.ones(1))


def test_chunks_cover_everything() -> None:
    gaps = torch.randn(37, 20)[:, 3:]
    parts = chunks(gaps, limit_bytes=400)
    assert max(part.nbytes for part in parts) <= 400
    assert torch.equal(torch.cat(parts), gaps)
