"""GPUDirect Storage: to be had or refused with a reason, and never short.

Without a GPU, stand-ins take kvikio's place at its one import (`gds`); the tests marked
`gpu` use the real one.
"""

import ctypes
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from ssdtrain.errors import StorageFullError
from ssdtrain.storage import PosixStorage, gds
from ssdtrain.storage.gds import DeviceBytes, GdsStorage, why_no_gds
from tests.ssdtrain.kvikio_files import use_kvikio

MIB = 1024 * 1024
PAGE = 4096
Aligned = Callable[..., torch.Tensor]


class DeviceTensor:
    """Host bytes that say they are on a GPU."""

    is_cuda = True
    dtype = torch.uint8
    device = torch.device("cuda:0")

    def __init__(self, host: torch.Tensor) -> None:
        self.host = host

    def numel(self) -> int:
        return self.host.numel()

    def dim(self) -> int:
        return self.host.dim()

    def data_ptr(self) -> int:
        return self.host.data_ptr()


class FakeFuture(NamedTuple):
    moved: int

    def get(self) -> int:
        return self.moved


class FakeFile:
    """kvikio's file, moving host bytes; `behave` is set by the test."""

    refuses_links = False
    behave: Callable[[int], int] = staticmethod(lambda size: size)
    paths: list[str] = []  # noqa: RUF012  (reset by the fixture)

    def __init__(self, path: str) -> None:
        if self.refuses_links and path.startswith("/proc/"):
            raise OSError("cuFile wants a name")
        self.paths.append(path)
        self._fd = os.open(path, os.O_RDWR)

    def pwrite(
        self, data: DeviceBytes, size: int, offset: int, task: int
    ) -> "FakeFuture":
        address = data.__cuda_array_interface__["data"][0]
        moved = self.behave(size)
        return FakeFuture(os.pwrite(self._fd, ctypes.string_at(address, moved), offset))

    def pread(
        self, data: DeviceBytes, size: int, offset: int, task: int
    ) -> "FakeFuture":
        got = os.pread(self._fd, self.behave(size), offset)
        ctypes.memmove(data.__cuda_array_interface__["data"][0], got, len(got))
        return FakeFuture(len(got))

    def close(self) -> None:
        os.close(self._fd)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeFile]:
    file = type("File", (FakeFile,), {"paths": []})
    monkeypatch.setattr(gds, "open_cufile", file)
    return file


@pytest.fixture
def posix(directory: Path) -> PosixStorage:
    return PosixStorage(directory, extent_bytes=MIB)


def test_both_kinds_of_buffer_reach_the_same_bytes(
    posix: PosixStorage, fake: type[FakeFile], aligned: Aligned
) -> None:
    store = GdsStorage(posix)
    slot, sent, back = store.allocate(MIB), aligned(MIB, seed=1), aligned(MIB)
    store.write(slot, DeviceTensor(sent))  # type: ignore[arg-type]
    store.read(slot, back)
    assert torch.equal(sent, back)
    store.write(slot, aligned(MIB, seed=2))
    store.read(slot, DeviceTensor(back))  # type: ignore[arg-type]
    assert torch.equal(back, aligned(MIB, seed=2))
    assert store.describe().startswith("GDS: /")
    store.close()


def test_short_transfers_are_errors(
    posix: PosixStorage, fake: type[FakeFile], aligned: Aligned
) -> None:
    store = GdsStorage(posix)
    slot, device = store.allocate(MIB), DeviceTensor(aligned(MIB))
    fake.behave = staticmethod(lambda size: size - PAGE)
    short = f"{MIB - PAGE} of {MIB} bytes"
    calls: list[Callable[[], object]] = [
        lambda: store.write(slot, device),  # type: ignore[arg-type]
        lambda: store.read(slot, device),  # type: ignore[arg-type]
    ]
    for call in calls:
        with pytest.raises(OSError, match=rf"short .* at offset 0 \(GDS\): {short}"):
            call()
    store.close()


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("KvikIO failure at: x.cpp:1: No space left on device", StorageFullError),
        ("cuFile error at: x.cpp:2: device error", OSError),
    ],
)
def test_kvikios_errors_get_a_kind(
    text: str,
    kind: type[OSError],
    posix: PosixStorage,
    fake: type[FakeFile],
    aligned: Aligned,
) -> None:
    def fail(size: int) -> int:
        raise RuntimeError(text)

    fake.behave = staticmethod(fail)
    store = GdsStorage(posix)
    slot, device = store.allocate(PAGE), DeviceTensor(aligned(PAGE))
    with pytest.raises(OSError, match=r"write to .* failed: ") as raised:
        store.write(slot, device)  # type: ignore[arg-type]
    assert type(raised.value) is kind


def test_bad_device_buffers(
    posix: PosixStorage, fake: type[FakeFile], aligned: Aligned
) -> None:
    store = GdsStorage(posix)
    slot = store.allocate(PAGE)
    for bad in (aligned(2 * PAGE), aligned(PAGE)[:0]):
        with pytest.raises(ValueError, match="does not fit"):
            store.write(slot, DeviceTensor(bad))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="1-D uint8 CUDA tensor"):
        store.write(slot, DeviceTensor(aligned(PAGE).view(2, -1)))  # type: ignore[arg-type]
    store.close()
    with pytest.raises(OSError, match="closed"):
        store.read(slot, DeviceTensor(aligned(PAGE)))  # type: ignore[arg-type]


def test_a_file_gets_a_name_only_while_it_is_opened(
    posix: PosixStorage, fake: type[FakeFile], directory: Path, aligned: Aligned
) -> None:
    fake.refuses_links = True
    store = GdsStorage(posix)
    assert fake.paths[0].startswith(str(directory))
    assert list(directory.iterdir()) == []
    slot, sent, back = store.allocate(PAGE), aligned(PAGE, seed=3), aligned(PAGE)
    store.write(slot, DeviceTensor(sent))  # type: ignore[arg-type]
    store.read(slot, back)
    assert torch.equal(sent, back)
    store.close()


# -- what is to be had here -------------------------------------------------------


def test_without_kvikio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gds, "find_spec", lambda _: None)
    assert why_no_gds() == "kvikio is not installed (pip install 'ssdtrain[gds]')"


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(gds, "find_spec", lambda _: True)
    monkeypatch.setattr(gds.ctypes, "CDLL", missing)
    expected = "libcuda.so.1 is missing: no NVIDIA driver on this machine"
    assert why_no_gds() == expected


class FakeDriver(types.ModuleType):
    """kvikio.cufile_driver; a driver that is not open answers nothing."""

    def __init__(self, has_gds: bool, error: str | None) -> None:
        super().__init__("kvikio.cufile_driver")
        self.has_gds, self.error, self.opened = has_gds, error, 0

    def initialize(self) -> None:
        if self.error is not None:
            raise RuntimeError(self.error)
        self.opened += 1

    def get(self, name: str) -> bool:
        if self.opened < 1:
            raise RuntimeError("not open")
        assert name == "is_gds_available"
        return self.has_gds


@pytest.mark.parametrize(
    ("has_gds", "error", "reason"),
    [
        (True, None, ""),
        (False, None, "the nvidia-fs kernel module is missing"),
        (True, "\ncuFile: no libcufile", "cuFile does not open: cuFile: no libcufile"),
    ],
)
def test_what_kvikio_says(
    has_gds: bool, error: str | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = FakeDriver(has_gds, error)
    package = types.ModuleType("kvikio")
    package.__version__ = "26.10.00"  # type: ignore[attr-defined]
    package.cufile_driver = driver  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvikio", package)
    monkeypatch.setitem(sys.modules, "kvikio.cufile_driver", driver)
    monkeypatch.setattr(gds, "find_spec", lambda _: True)
    monkeypatch.setattr(gds.ctypes, "CDLL", lambda _: None)
    assert why_no_gds() == reason
    package.__version__ = "24.12.01"  # type: ignore[attr-defined]
    assert why_no_gds() == "kvikio 24.12 is older than 25.2"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_real_bytes(
    directory: Path, aligned: Aligned, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_kvikio(monkeypatch)
    store = GdsStorage(PosixStorage(directory))
    slot = store.allocate(16 * MIB)
    sent = torch.randint(0, 256, (16 * MIB,), dtype=torch.uint8, device="cuda")
    back, host = torch.zeros_like(sent), aligned(16 * MIB)
    torch.cuda.synchronize()
    store.write(slot, sent)
    store.read(slot, back)
    store.read(slot, host)
    assert torch.equal(sent, back) and torch.equal(sent.cpu(), host)
    store.close()
