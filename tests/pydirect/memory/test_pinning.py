"""Memory that exists is pinned in place, and unpinned when its last alias dies."""

import gc
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from pydirect import memory
from pydirect.memory import (
    alias,
    arena,
    managed,
    pinning,
    pool,
    raw,
    runtime,
)


class Driver:
    """Records what is registered, and refuses what a driver would refuse."""

    def __init__(self) -> None:
        self.registered: dict[int, tuple[int, bool]] = {}
        self.waits = 0

    def register_memory(self, address: int, num_bytes: int, *, read_only: bool) -> None:
        for start, (size, _) in self.registered.items():
            if address < start + size and start < address + num_bytes:
                raise memory.HostMemoryError("already registered")
        self.registered[address] = (num_bytes, read_only)

    def unregister(self, address: int) -> None:
        self.waits += 1
        del self.registered[address]

    def synchronize_all(self) -> None:
        self.waits += 1


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A machine that seems to have a GPU."""
    fake = Driver()
    for name in ("register_memory", "unregister", "synchronize_all"):
        monkeypatch.setattr(runtime, name, getattr(fake, name))
    monkeypatch.setattr(runtime, "cuda_works", lambda: True)
    monkeypatch.setattr(pinning, "reach_of", lambda address: memory.Reach.NONE)
    return fake


def test_in_place_and_alive(driver: Driver) -> None:
    source = torch.arange(3000.0).view(1000, 3)
    pinned = memory.pin(source)
    assert pinned.data_ptr() == source.data_ptr() and torch.equal(pinned, source)
    ((start, (size, read_only)),) = driver.registered.items()
    assert start <= source.data_ptr() < source.data_ptr() + 12000 <= start + size
    assert not read_only
    row = pinned[5]
    del source, pinned
    gc.collect()
    assert row.tolist() == [15.0, 16.0, 17.0], "a view keeps bytes and registration"
    assert driver.registered
    del row
    gc.collect()
    assert not driver.registered


def test_numpy_and_memory_mapped_files(driver: Driver, tmp_path: Path) -> None:
    values = np.arange(4096, dtype=np.int32).reshape(64, 64)
    values.tofile(tmp_path / "rows.bin")
    mapped = np.memmap(tmp_path / "rows.bin", np.int32, mode="r", shape=(64, 64))
    pinned = memory.pin(mapped)
    del mapped
    gc.collect()
    assert torch.equal(pinned, torch.from_numpy(values))
    assert [read_only for _, read_only in driver.registered.values()] == [True]
    writable = memory.pin(values)
    values[0, 0] = 99
    assert writable[0, 0] == 99
    assert sorted(flag for _, flag in driver.registered.values()) == [False, True]


def test_only_the_bytes_of_a_storage_are_pinned_and_all_of_them(driver: Driver) -> None:
    """CUDA refuses a copy of memory that is pinned in part: neighbours on the same
    page, and the rest of a view's storage, must not end up so."""
    base = torch.arange(6000, dtype=torch.uint8)
    part = memory.pin(base[100:300])
    assert torch.equal(part, base[100:300])
    assert driver.registered == {base.data_ptr(): (6000, False)}
    array = np.arange(1000, dtype=np.int16)
    kept = memory.pin(array)
    assert driver.registered[array.ctypes.data] == (2000, False)
    assert kept.shape == (1000,)


def test_pinning_twice_is_one_registration_until_the_last(driver: Driver) -> None:
    source = torch.arange(3000.0)
    first = memory.pin(source)
    second, third = memory.pin(source), memory.pin(source[10:20])
    assert len(driver.registered) == 1
    del first, source
    gc.collect()
    assert driver.registered, "the others still read it"
    del second
    gc.collect()
    assert driver.registered and third.tolist() == list(range(10, 20))
    del third
    gc.collect()
    assert not driver.registered


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64, torch.bool])
def test_dtypes(dtype: torch.dtype) -> None:
    source = torch.ones(5, 2).to(dtype)
    assert memory.pin(source).dtype is dtype
    assert torch.equal(memory.pin(source), source)


def test_what_cannot_be_pinned() -> None:
    with pytest.raises(ValueError, match="contiguous tensor"):
        memory.pin(torch.zeros(4, 4).t())
    with pytest.raises(ValueError, match="tensor on meta"):
        memory.pin(torch.zeros(4, device="meta"))
    with pytest.raises(ValueError, match="C-contiguous array"):
        memory.pin(np.zeros((4, 4)).T)
    with pytest.raises(ValueError, match="dtype that torch has"):
        memory.pin(np.array(["a"]))
    with pytest.raises(ValueError, match=r"pinned memory|CUDA device"):
        memory.device_alias(torch.zeros(4), "cuda:0")


def test_to_table_copies(tmp_path: Path) -> None:
    values = np.arange(60, dtype=np.float64).reshape(20, 3)
    values.tofile(tmp_path / "rows.bin")
    mapped = np.memmap(tmp_path / "rows.bin", np.float64, mode="r", shape=(20, 3))
    expected = torch.from_numpy(values)
    for source in (mapped, values, values.T.copy().T, expected, expected.t()):
        table = memory.to_table(source)
        assert table.is_contiguous()
        assert torch.equal(table, expected if table.shape[0] == 20 else expected.t())
        assert table.data_ptr() != expected.data_ptr()
    assert memory.to_table(np.zeros((0, 2), np.int8)).shape == (0, 2)
    with pytest.raises(ValueError, match="host memory"):
        memory.to_table(torch.zeros(3, device="meta"))


def test_empty_sources() -> None:
    assert memory.pin(torch.zeros(0, 3)).shape == (0, 3)
    assert memory.pin(np.zeros((0, 3), np.float32)).dtype is torch.float32


def test_pool_waits_before_reuse_and_unpins(driver: Driver) -> None:
    own = memory.HostPool(arena_bytes=2 << 20)
    first = own.empty((2 << 20,), torch.uint8)
    assert len(driver.registered) == 1
    del first
    assert driver.waits == 0, "a finalizer does not wait"
    second = own.empty((2 << 20,), torch.uint8)
    assert driver.waits == 1 and own.stats().num_waits == 1, "reuse does"
    del own
    gc.collect()
    assert driver.registered, "the tensor outlives the pool"
    del second
    gc.collect()
    assert not driver.registered


def test_a_forked_child_releases_nothing(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = memory.pin(torch.zeros(100))
    monkeypatch.setattr(raw.os, "getpid", lambda: -1)
    del pinned
    gc.collect()
    assert driver.registered


def test_trim_unpins(driver: Driver) -> None:
    own = memory.HostPool(arena_bytes=2 << 20)
    own.empty((10,))
    assert own.trim() == 2 << 20
    assert not driver.registered


def test_table() -> None:
    table = memory.HostTable(torch.arange(12.0).view(3, 4))
    assert (table.num_rows, table.row_bytes) == (3, 16)
    alias = table.alias("cpu")
    alias[0, 0] = 5
    assert table.tensor[0, 0] == 5 and table.alias("cpu") is alias
    with pytest.raises(ValueError, match="at least one dimension"):
        memory.HostTable(torch.tensor(1.0))


def test_pool_module_is_the_only_default() -> None:
    assert pool.default_pool() is pool.default_pool()


def test_tables_take_large_pages_while_there_is_room(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []

    def managed_arena(num_bytes: int) -> arena.Arena:
        taken.append(num_bytes)
        return arena.registered_arena(num_bytes, ())

    own = {backing: memory.HostPool(backing=backing) for backing in memory.Backing}
    monkeypatch.setattr(pool, "managed_arena", managed_arena)
    monkeypatch.setattr(managed, "managed_capacity_bytes", lambda: 200 << 20)
    monkeypatch.setattr(pool, "default_pool", own.__getitem__)
    monkeypatch.setattr(pool, "empty_pinned", own[memory.Backing.REGISTERED].empty)
    small = memory.empty_table((1 << 20,), torch.uint8)
    assert taken == [], "small tables fit the translation caches"
    first = memory.empty_table((100 << 20,), torch.uint8)
    assert taken == [100 << 20]
    second = memory.empty_table((101 << 20,), torch.uint8)
    assert taken == [100 << 20], "no room: pinned instead"
    del first
    third = memory.empty_table((150 << 20,), torch.uint8)
    assert taken == [100 << 20, 150 << 20], "the unused arena made room"
    with pytest.raises(memory.HostMemoryError, match=r"Backing\.REGISTERED"):
        own[memory.Backing.MANAGED].empty((190 << 20,), torch.uint8)
    assert small.numel() + second.numel() + third.numel() == 252 << 20


def test_managed_memory_stays_below_what_the_gpus_have_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A driver that runs out of GPU memory for what is managed can stall the GPU."""
    free = {0: 50, 1: 30, 2: 99}
    monkeypatch.setattr(runtime, "cuda_works", lambda: True)
    monkeypatch.setattr(runtime, "devices_in_use", lambda: [0, 1])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (free[gpu], 100))
    concurrent = {0: True, 1: True, 2: True}
    monkeypatch.setattr(managed, "_is_concurrent", lambda gpu: concurrent[gpu])
    assert managed.managed_capacity_bytes() == 10
    managed.require_managed(6, 4)
    with pytest.raises(memory.ManagedMemoryError, match="beside 4 in use"):
        managed.require_managed(7, 4)
    free[0] = 15
    assert managed.managed_capacity_bytes() == 0, "the GPU is full"
    free[0], concurrent[2] = 50, False
    assert managed.managed_capacity_bytes() == 0, "one GPU cannot"


def test_reach_asks_for_the_first_and_the_last_element(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory that is pinned in part is not in reach; nothing beside is asked for."""
    asked: list[int] = []
    monkeypatch.setattr(pinning.runtime, "cuda_works", lambda: True)
    monkeypatch.setattr(
        pinning,
        "reach_of",
        lambda address: asked.append(address) or memory.Reach.PINNED,
    )
    rows = torch.zeros(6, 4)
    assert memory.reach(rows) is memory.Reach.PINNED
    first = rows.data_ptr()
    assert asked == [first, first + 23 * 4]
    asked.clear()
    memory.reach(rows[1:, 1:3])
    assert asked == [first + 5 * 4, first + 22 * 4]


def test_an_alias_keeps_memory_pinned_that_somebody_else_has_pinned(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second alias of a tensor outlives the first one, whose `pin` it was."""

    def reach_of(address: int) -> memory.Reach:
        inside = any(a <= address < a + n for a, (n, _) in driver.registered.items())
        return memory.Reach.PINNED if inside else memory.Reach.NONE

    def bytes_on(host: torch.Tensor, *_: int) -> torch.Tensor:
        return host.view(torch.uint8)

    monkeypatch.setattr(pinning, "reach_of", reach_of)
    monkeypatch.setattr(alias, "bytes_on", bytes_on)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    source = torch.arange(300.0)
    first = memory.device_alias(memory.pin(source), "cuda:0")
    second = memory.device_alias(source, "cuda:0")
    del first
    gc.collect()
    assert driver.registered and torch.equal(second, source)
    del second
    gc.collect()
    assert not driver.registered
