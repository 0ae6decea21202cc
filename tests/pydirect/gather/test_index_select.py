"""Every path gives what torch.index_select gives."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pydirect import gather, memory

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.int8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    flat = a.contiguous().flatten().view(torch.uint8)
    return a.shape == b.shape and torch.equal(
        flat, b.contiguous().flatten().view(torch.uint8)
    )


def random_table(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    table = memory.empty_pinned(shape, dtype)
    table.flatten().view(torch.uint8).random_(0, 2 if dtype == torch.bool else 120)
    return table


def reference(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    picked = [table[i] for i in index.tolist()]
    return torch.stack(picked) if picked else table[:0]


@pytest.mark.parametrize("path", list(gather.Path))
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_equals_indexing(path: gather.Path, data: st.DataObject) -> None:
    num_rows = data.draw(st.integers(1, 50))
    row = data.draw(st.sampled_from([(), (1,), (3,), (32,), (2, 5), (33,), (130,)]))
    table = random_table((num_rows, *row), data.draw(st.sampled_from(DTYPES)))
    rows = data.draw(st.lists(st.integers(0, num_rows - 1), max_size=60))
    index = torch.tensor(
        rows, dtype=data.draw(st.sampled_from([torch.int32, torch.int64]))
    )
    assert same_bytes(
        gather.index_select(table, index, path=path), reference(table, index)
    )


def test_out_is_written_in_place() -> None:
    table = random_table((9, 4), torch.float32)
    index = torch.tensor([8, 0, 8])
    out = torch.empty(3, 4)
    assert gather.index_select(memory.HostTable(table), index, out=out) is out
    assert same_bytes(out, table[index])
