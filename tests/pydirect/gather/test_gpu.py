"""The same laws on a GPU, with memory that is really pinned."""

import gc

import pytest
import torch

from pydirect import gather, memory
from pydirect.gather.front import front_of
from pydirect.gather.request import as_request

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def table_of(num_rows: int, row_bytes: int) -> torch.Tensor:
    table = memory.empty_pinned((num_rows, row_bytes), torch.uint8)
    return table.random_(0, 255)


@pytest.mark.parametrize("path", [None, *gather.Path])
@pytest.mark.parametrize("row_bytes", [1, 4, 16, 100, 128, 400, 1030, 2052, 4096])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_equals_indexing(
    path: gather.Path | None, row_bytes: int, dtype: torch.dtype
) -> None:
    table = table_of(5000, row_bytes)
    index = torch.randint(0, 5000, (3001,), dtype=dtype)
    out = gather.index_select(table, index.cuda(), path=path)
    gather.check()
    assert torch.equal(out.cpu(), table[index.long()])


def test_repeats_are_found_and_read_once() -> None:
    table = table_of(5000, 512)
    index = torch.randint(0, 40, (20_000,), device="cuda")
    for _ in range(20):
        out = gather.index_select(table, index, path="sorted")
        torch.cuda.synchronize()
    look = front_of(torch.device("cuda", 0)).survey.look(as_request(table, index, out))
    assert look.distinct_share < 0.01
    assert torch.equal(out.cpu(), table[index.cpu()])


@pytest.mark.parametrize("path", list(gather.Path))
def test_bad_index_is_raised_by_check(path: gather.Path) -> None:
    table = table_of(10, 16)
    index = torch.tensor([1, 12, 2], device="cuda")
    with pytest.raises(gather.GatherIndexError, match="index 12 at position 1 "):
        gather.index_select(table, index, path=path)
        gather.check()
    gather.check()


def test_stream_and_sm_budget() -> None:
    table = table_of(50_000, 256)
    index = torch.randint(0, 50_000, (40_000,), device="cuda")
    side = torch.cuda.Stream()
    out = gather.index_select(table, index, max_sms=4, stream=side, path="direct")
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(out.cpu(), table[index.cpu()])


def test_alias_shares_memory_and_keeps_it() -> None:
    host = memory.pin(torch.arange(100_000.0))
    alias = memory.device_alias(host, 0)
    assert alias.data_ptr() == host.data_ptr()
    host[7] = -1
    assert alias[7].item() == -1
    alias.add_(1)
    torch.cuda.synchronize()
    assert host[8] == 9
    del host
    gc.collect()
    assert alias[99_999].item() == 100_000


def test_memory_outlives_gpu_work() -> None:
    """Free host memory while a kernel still reads it, then overwrite its place."""
    pool = memory.HostPool(arena_bytes=32 << 20)
    for turn in range(20):
        host = pool.empty((4 << 20,), torch.int64).fill_(turn)
        alias = memory.device_alias(host, 0)
        torch.cuda._sleep(5_000_000)
        copied = alias.clone()
        del host, alias
        pool.empty((4 << 20,), torch.int64).fill_(-1)
        assert copied.eq(turn).all().item()


def test_pinned_in_place_and_released() -> None:
    source = torch.arange(3_000_000.0)
    assert not source.is_pinned()
    pinned = memory.pin(source)
    assert memory.is_pinned(source) and pinned.data_ptr() == source.data_ptr()
    del pinned
    gc.collect()
    assert not memory.is_pinned(source)


def test_neighbours_of_pinned_memory_can_still_be_copied() -> None:
    """They share a page with it; a copy of memory that is pinned in part fails."""
    raw = torch.arange(40_000, dtype=torch.uint8)
    array = raw.numpy()
    pinned = memory.pin(array[5000:15_003])
    index = torch.tensor([10_002, 0], device="cuda")
    got = gather.index_select(pinned.view(-1, 1), index, path="direct")
    assert got.flatten().tolist() == [array[15_002], array[5000]]
    for neighbour in (raw[:5000], raw[15_003:]):
        assert torch.equal(neighbour.clone().cuda().cpu(), neighbour)
        assert torch.equal(neighbour.cuda().cpu(), neighbour)


def test_pinned_twice_is_pinned_until_the_last() -> None:
    source = torch.arange(1_000_000.0)
    first, second = memory.pin(source), memory.pin(source)
    alias = memory.device_alias(second, 0)
    del first, second
    gc.collect()
    assert alias[999_999].item() == 999_999
    del alias
    gc.collect()
    assert not memory.is_pinned(source)


def test_zero_copy_of_plain_memory_is_refused() -> None:
    index = torch.tensor([1], device="cuda")
    plain = torch.zeros(10, 4)
    with pytest.raises(ValueError, match=r"pydirect\.memory\.pin"):
        gather.index_select(plain, index, path="direct")
    before = gather.stats().num_unpinned
    assert gather.index_select(plain, index).tolist() == [[0.0] * 4]
    assert gather.stats().num_unpinned == before + 1


def test_large_tables_are_mapped_in_large_pages() -> None:
    source = torch.randint(0, 255, (300_000, 512), dtype=torch.uint8)
    table = memory.to_table(source)
    assert memory.reach(table) is memory.Reach.MANAGED
    assert memory.reach(memory.pin(source)) is memory.Reach.PINNED
    index = torch.randint(0, 300_000, (50_000,), device="cuda")
    for path in (None, *gather.Path):
        out = gather.index_select(table, index, path=path)
        assert torch.equal(out.cpu(), source[index.cpu()])
    alias = memory.device_alias(table, 0)
    assert torch.equal(alias[index].cpu(), source[index.cpu()])
    table[index[0].item()] = 7
    assert gather.index_select(table, index[:1]).eq(7).all()
    del table, alias
    gc.collect()
    pool = memory.default_pool(memory.Backing.MANAGED)
    pool.trim()
    assert pool.stats().reserved_bytes == 0


def test_large_pages_stay_on_the_host() -> None:
    """Reading a managed table takes GPU memory for the result alone."""
    table = memory.empty_table((1 << 20, 1024), torch.uint8).fill_(3)
    index = torch.randint(0, 1 << 20, (400_000,), device="cuda")
    gather.index_select(table, index[:10], path="direct")
    before, _ = torch.cuda.mem_get_info()
    out = gather.index_select(table, index, path="direct")
    torch.cuda.synchronize()
    after, _ = torch.cuda.mem_get_info()
    assert before - after < out.nbytes + (64 << 20)
    assert out.eq(3).all()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_alias_on_another_gpu_is_no_copy() -> None:
    host = memory.pin(torch.arange(1000.0))
    alias = memory.device_alias(host, 1)
    assert alias.device.index == 1 and alias.data_ptr() == host.data_ptr()
    assert torch.equal(alias.cpu(), host)
