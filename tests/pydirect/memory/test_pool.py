"""The pool: sizes, reuse, merging, placement, limits."""

import ctypes
import gc
import itertools
import mmap
import os
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pydirect import memory
from pydirect.memory import arena, limits, runtime

KIB = 1 << 10
MIB = 1 << 20


def test_no_rounding_to_powers_of_two() -> None:
    own = memory.HostPool(arena_bytes=1 * MIB)
    kept = own.empty((33 * MIB + 5,), torch.uint8)
    assert kept.shape == (33 * MIB + 5,)
    assert own.stats().in_use_bytes == 33 * MIB + 4 * KIB
    assert own.stats().reserved_bytes == 33 * MIB + 4 * KIB


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 300_000)), max_size=30))
def test_pieces_never_overlap_and_come_back(steps: list[tuple[bool, int]]) -> None:
    own = memory.HostPool(arena_bytes=2 * MIB)
    held: list[torch.Tensor] = []
    for take, size in steps:
        if take or not held:
            held.append(own.empty((size,), torch.uint8))
            assert held[-1].data_ptr() % 4096 == 0
        else:
            held.pop(size % len(held))
        spans = sorted((t.data_ptr(), t.data_ptr() + t.numel()) for t in held)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    held.clear()
    assert own.stats().in_use_bytes == 0
    own.trim()
    assert own.stats().reserved_bytes == 0, "all pieces merged again"


def test_freed_memory_is_reused() -> None:
    own = memory.HostPool(arena_bytes=4 * MIB)
    first = own.empty((4 * MIB,), torch.uint8)
    place = first.data_ptr()
    del first
    assert own.empty((3 * MIB,), torch.uint8).data_ptr() == place
    assert own.stats().num_arenas == 1


def test_shapes_and_dtypes() -> None:
    own = memory.HostPool()
    assert own.empty((3, 0, 2), torch.bfloat16).shape == (3, 0, 2)
    assert own.empty((), torch.float64).fill_(2.5).item() == 2.5
    half = own.empty((2, 3), torch.float8_e4m3fn)
    assert half.dtype is torch.float8_e4m3fn and half.is_contiguous()


def test_views_keep_the_memory() -> None:
    own = memory.HostPool(arena_bytes=1 * MIB)
    view = own.empty((1000,), torch.int32).fill_(7)[10:20].view(torch.int16)
    gc.collect()
    other = own.empty((1000,), torch.int32).fill_(9)
    assert view.view(torch.int32).eq(7).all() and other.eq(9).all()


def test_tensor_outlives_its_pool() -> None:
    own = memory.HostPool(arena_bytes=1 * MIB)
    kept = own.empty((1000,), torch.int32).fill_(7)
    del own
    gc.collect()
    assert kept.eq(7).all()


def test_threads() -> None:
    own = memory.HostPool(arena_bytes=1 * MIB)
    wrong: list[int] = []

    def work(mark: int) -> None:
        for _ in range(200):
            piece = own.empty((777,), torch.int64).fill_(mark)
            if not piece.eq(mark).all():
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert own.stats().in_use_bytes == 0


def test_numa_placement() -> None:
    own = memory.HostPool(arena_bytes=1 * MIB)
    node = memory.numa_nodes()[0]
    try:
        placed = own.empty((10,), numa_nodes=(node,))
    except memory.HostMemoryError as error:
        pytest.skip(f"this container forbids placement: {error}")
    assert placed.fill_(1).sum() == 10


def test_numa_nodes_that_are_not_here() -> None:
    """Said before the kernel is asked, which may forbid placement altogether."""
    own = memory.HostPool(arena_bytes=1 * MIB)
    told = r"nodes of this machine, \(0.*\), got nodes \(63,\)"
    with pytest.raises(memory.HostMemoryError, match=told):
        own.empty((10,), numa_nodes=(63,))


def test_control_group_limit_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    tight = memory.MemoryLimits(
        available_bytes=1 << 40, cgroup_free_bytes=8 * MIB, memlock_bytes=None
    )
    monkeypatch.setattr(arena, "read_limits", lambda: tight)
    with pytest.raises(memory.HostMemoryError, match=r"memory\.max"):
        memory.HostPool().empty((1 << 30,), torch.uint8)


def test_scarce_memory_warns() -> None:
    scarce = memory.MemoryLimits(
        available_bytes=8 * MIB, cgroup_free_bytes=None, memlock_bytes=64 * KIB
    )
    with pytest.warns(memory.HostMemoryWarning, match="MemAvailable is 0.01 GiB"):
        scarce.check(1 << 30)
    assert "RLIMIT_MEMLOCK 0.00 GiB" in scarce.describe()


def test_control_group_files(tmp_path: "limits.Path") -> None:
    group = tmp_path / "a" / "b"
    group.mkdir(parents=True)
    for place, limit in ((tmp_path / "a", "1000"), (group, "max")):
        (place / "memory.max").write_text(limit + "\n")
        (place / "memory.current").write_text("400\n")
        (place / "memory.stat").write_text("anon 300\ninactive_file 60\n")
    (tmp_path / "membership").write_text("0::/a/b\n")
    assert limits.cgroup_free_bytes_of(tmp_path / "membership", tmp_path) == 660


def test_pinning_failure_names_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    class Runtime:
        @staticmethod
        def cudaHostRegister(address: int, num_bytes: int, flags: int) -> int:
            return 2

    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    with pytest.raises(memory.HostMemoryError, match=r"error 2 .*RLIMIT_MEMLOCK"):
        runtime.register_memory(4096, 4096, read_only=False)


@pytest.mark.parametrize(("nodes", "mode"), [((0,), 1), ((0, 1), 3)])
def test_one_node_is_preferred_and_several_take_turns(
    monkeypatch: pytest.MonkeyPatch, nodes: tuple[int, ...], mode: int
) -> None:
    """As the kernel tells: MPOL_PREFERRED is 1, MPOL_INTERLEAVE is 3."""
    number = {"x86_64": 239, "aarch64": 236}.get(os.uname().machine)
    monkeypatch.setattr(runtime, "numa_nodes", lambda: (0, 1))
    pages = mmap.mmap(-1, 1 << 16)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    found = ctypes.c_int(-1)
    libc = ctypes.CDLL(None, use_errno=True)
    if number is None:
        pytest.skip("no number of the system call")
    try:
        runtime.bind_memory(address, len(pages), nodes)
    except memory.HostMemoryError as error:
        pytest.skip(f"the kernel forbids it here: {error}")
    mask, room = (ctypes.c_ulong * 16)(), ctypes.c_ulong(1024)
    where, flags = ctypes.c_void_p(address), ctypes.c_ulong(2)
    failed = libc.syscall(
        ctypes.c_long(number), ctypes.byref(found), mask, room, where, flags
    )
    if failed:
        pytest.skip("the kernel does not tell")
    assert found.value == mode
