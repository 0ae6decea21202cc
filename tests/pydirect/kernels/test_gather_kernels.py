"""The CUDA source gives what torch.index_select gives, run thread by thread."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pydirect.kernels import gather as kernels

RELAXED = settings(
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def placed(num_bytes: int, offset: int) -> torch.Tensor:
    """Bytes that start ``offset`` after a multiple of 128."""
    raw = torch.zeros(num_bytes + 512, dtype=torch.uint8)
    start = -raw.data_ptr() % 128 + offset
    return raw[start : start + num_bytes]


def arguments(
    table: torch.Tensor, index: torch.Tensor, out: torch.Tensor, **more: Any
) -> kernels.GatherArgs:
    return kernels.GatherArgs(
        table=table.data_ptr(),
        out=out.data_ptr(),
        index=index.data_ptr(),
        num_indices=index.numel(),
        num_rows=table.shape[0],
        row_bytes=table.shape[1],
        **{"check": 1, **more},
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows = draw(st.integers(1, 40))
    row = draw(st.sampled_from([1, 2, 4, 7, 12, 16, 48, 64, 100, 128, 400, 1040, 2052]))
    table = placed(num_rows * row, draw(st.sampled_from([0, 16, 4, 1, 64])))
    table.copy_(torch.arange(table.numel()) * 7919 % 251)
    rows = draw(st.lists(st.integers(0, num_rows - 1), min_size=1, max_size=70))
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    return table.view(num_rows, row), torch.tensor(rows, dtype=dtype)


@RELAXED
@given(
    case=cases(),
    share=st.sampled_from(kernels.Share),
    start=st.sampled_from(kernels.Start),
    blocks=st.integers(1, 5),
)
def test_gather(
    host_module: Any, case: Any, share: Any, start: Any, blocks: int
) -> None:
    table, index = case
    out = torch.full((index.numel(), table.shape[1]), 255, dtype=torch.uint8)
    error, fault = torch.zeros(2, 3, dtype=torch.int64)
    shape = kernels.Shape(num_blocks=blocks, threads=64, share=share, start=start)
    flags = {"error": error.data_ptr(), "fault": fault.data_ptr()}
    given_args = arguments(table, index, out, **flags)
    kernels.launch_gather(host_module, given_args, index.dtype, shape, 0)
    assert torch.equal(out, table[index.long()])
    assert fault.tolist() == [0, 0, 0]


@RELAXED
@given(
    case=cases(),
    shift=st.integers(2, 14),
    bad=st.booleans(),
    once=st.booleans(),
    wraps=st.booleans(),
    blocks=st.integers(1, 5),
)
def test_order_then_gather(
    host_module: Any,
    case: Any,
    shift: int,
    bad: bool,
    once: bool,
    wraps: bool,
    blocks: int,
) -> None:
    table, index = case
    rows = table.shape[0]
    if bad:
        index = torch.cat((index, index.new_tensor([rows, 0])))
    means = index.to(torch.int64, copy=True)
    if wraps:
        index[::2] -= rows * (index[::2] < rows).to(index.dtype)
    num = index.numel()
    error, fault = torch.zeros(2, 3, dtype=torch.int64)
    buckets = (table.numel() >> shift) + 1
    counts = torch.full((buckets + 2,), 77, dtype=torch.int32)
    sums = torch.full((kernels.num_sums(buckets),), 77, dtype=torch.int32)
    rank, position, owner = torch.full((3, num), -9, dtype=torch.int32)
    slots = torch.full((1 << (2 * num - 1).bit_length(),), 77, dtype=torch.int32)
    order = torch.full((num,), -9)
    args = kernels.BucketArgs(
        index=index.data_ptr(),
        counts=counts.data_ptr(),
        sums=sums.data_ptr(),
        num_sums=sums.numel(),
        rank=rank.data_ptr(),
        order=order.data_ptr(),
        position=position.data_ptr(),
        owner=owner.data_ptr() if once else None,
        slots=slots.data_ptr() if once else None,
        error=error.data_ptr(),
        fault=fault.data_ptr(),
        num_indices=num,
        num_rows=rows,
        row_bytes=table.shape[1],
        num_buckets=buckets,
        num_slots=slots.numel() if once else 0,
        shift=shift,
        wraps=wraps,
    )
    kernels.launch_order(host_module, args, index.dtype, num_blocks=blocks, stream=0)
    placed_rows = int(counts[-1])
    good = means < rows
    distinct = means[good].unique().numel() + int((~good).sum())
    assert placed_rows == (distinct if once else num)
    order, position = order[:placed_rows], position[:placed_rows].long()
    assert position.unique().numel() == placed_rows, "no place twice"
    assert torch.equal(order, torch.where(good, means, -1)[position])
    pages = order[order >= 0] * table.shape[1] >> shift
    assert pages.diff().ge(0).all(), "in the order of pages"
    assert order[: len(pages)].ge(0).all(), "bad indices come last"

    out = torch.full((num, table.shape[1]), 255, dtype=torch.uint8)
    ordered = arguments(table, order, out, error=0, check=0, position=args.position)
    ordered.num_indices = num
    ordered.total = counts[-1:].data_ptr()
    shape = kernels.Shape(num_blocks=2, threads=64, share=kernels.Share.CONTIGUOUS)
    kernels.launch_gather(host_module, ordered, order.dtype, shape, 0)
    if once:
        assert out.ne(255).any(1).sum() == means[good].unique().numel(), "read once"
        repeats = kernels.RepeatArgs(
            out=out.data_ptr(),
            owner=owner.data_ptr(),
            num_indices=num,
            row_bytes=table.shape[1],
        )
        kernels.launch_repeats(host_module, repeats, num_blocks=blocks, stream=0)
    assert torch.equal(out[good], table[means[good]])
    assert out[~good].eq(255).all(), "a bad index writes nothing"
    assert fault.tolist() == ([num - 1, rows, rows] if bad else [0, 0, 0])


@pytest.mark.parametrize("bad", [-3, 10, 1 << 40])
def test_first_bad_index_is_reported(host_module: Any, bad: int) -> None:
    table = torch.arange(40, dtype=torch.uint8).view(10, 4)
    index = torch.tensor([1, bad, 2])
    out = torch.zeros(3, 4, dtype=torch.uint8)
    error, fault = torch.zeros(2, 3, dtype=torch.int64)
    flags = {"error": error.data_ptr(), "fault": fault.data_ptr()}
    args = arguments(table, index, out, **flags)
    shape = kernels.Shape(num_blocks=1, threads=32)
    kernels.launch_gather(host_module, args, index.dtype, shape, 0)
    assert fault.tolist() == [2, bad, 10]
    assert torch.equal(out[[0, 2]], table[[1, 2]])


def test_negative_indices_count_from_the_end_where_they_may(host_module: Any) -> None:
    table = torch.arange(40, dtype=torch.uint8).view(10, 4)
    index = torch.tensor([-1, 3, -10])
    out = torch.zeros(3, 4, dtype=torch.uint8)
    error, fault = torch.zeros(2, 3, dtype=torch.int64)
    flags = {"error": error.data_ptr(), "fault": fault.data_ptr(), "wraps": 1}
    shape = kernels.Shape(num_blocks=1, threads=32)
    args = arguments(table, index, out, **flags)
    kernels.launch_gather(host_module, args, index.dtype, shape, 0)
    assert torch.equal(out, table[index]) and fault.tolist() == [0, 0, 0]
    index[1] = -11
    kernels.launch_gather(host_module, args, index.dtype, shape, 0)
    assert fault.tolist() == [2, -11, 10]


@RELAXED
@given(rows=st.lists(st.integers(0, 500), min_size=1, max_size=300))
def test_survey_counts_breaks_and_distinct_values(host_module: Any, rows: Any) -> None:
    index = torch.tensor(rows)
    bitmap, counts = torch.zeros(1 << 13, dtype=torch.int32), torch.zeros(2).int()
    args = kernels.SurveyArgs(
        index=index.data_ptr(),
        bitmap=bitmap.data_ptr(),
        counts=counts.data_ptr(),
        num_indices=index.numel(),
        num_bits=32 * bitmap.numel(),
    )
    kernels.launch_survey(host_module, args, index.dtype, num_blocks=3, stream=0)
    assert counts[0] == index.diff().ne(1).sum()
    distinct = index.unique().numel()
    assert distinct * 0.97 - 1 <= counts[1] <= distinct
