"""Keep CUDA what PyTorch calls the accelerator, next to the unified device.

[Note: PrivateUse1 takes CUDA's place] PyTorch has room for one device from outside,
and once that device has a name PyTorch takes it for the only accelerator of the
process: ``c10::is_privateuse1_backend_registered()`` is the first question of
``at::accelerator::getAccelerator()``. The autograd engine then finds no stream for CUDA
nodes and stops every backward pass over CUDA tensors with an internal assertion
(torch 2.8 and later; upstream issue 161129, closed without a fix), and
``Tensor.pin_memory()`` asks the wrong allocator. Unified tensors compute on CUDA, so
CUDA must stay the accelerator.

There is no setting for it. But libtorch_cpu asks the question through one pointer, its
entry for that function in the table of imported functions. `keep_cuda` points it at a
function of the C library that answers 0, that is "no". Names, dispatch and storage of
the device live in other places and do not change. Nothing is done where the entry is
not found (another linker, another platform): `can_keep_cuda` says so, and the caller
refuses to enable the device next to CUDA, because CUDA training would stop working.

What this costs: the engine has no stream for unified tensors, so gradients may not
travel as unified tensors; see [Note: Gradients do not travel] in `pydirect.transfer`.
"""

import ctypes
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_QUESTION = b"_ZN3c1033is_privateuse1_backend_registeredEv"
_LIBRARY = "libtorch_cpu.so"
# Returns the level set by pthread_setconcurrency, which nobody has called for twenty
# years and which is 0 until somebody does.
_ANSWERS_ZERO = "pthread_getconcurrency"

_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_PLTRELSZ, _DT_STRTAB, _DT_SYMTAB, _DT_STRSZ, _DT_SYMENT = 2, 5, 6, 10, 11
_DT_RELA, _DT_RELASZ, _DT_JMPREL = 7, 8, 23
_RELOCATION = np.dtype([("offset", "<u8"), ("info", "<u8"), ("addend", "<i8")])
_SYMBOL = np.dtype(
    [
        ("name", "<u4"),
        ("info", "u1"),
        ("other", "u1"),
        ("section", "<u2"),
        ("value", "<u8"),
        ("size", "<u8"),
    ]
)
_PAGE_BYTES = 4096
_READ_WRITE = 3


class _Header(ctypes.Structure):
    """Elf64_Phdr."""

    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("offset", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("physical", ctypes.c_uint64),
        ("file_bytes", ctypes.c_uint64),
        ("memory_bytes", ctypes.c_uint64),
        ("align", ctypes.c_uint64),
    )


class _Loaded(ctypes.Structure):
    """The part of struct dl_phdr_info that is used."""

    _fields_ = (
        ("base", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("headers", ctypes.POINTER(_Header)),
        ("num_headers", ctypes.c_uint16),
    )


class _Image(NamedTuple):
    """A loaded library: where it lies, and its dynamic section."""

    base: int
    dynamic: dict[int, int]


def can_keep_cuda() -> bool:
    """Whether `keep_cuda` would find its entry. Changes nothing."""
    return _answer() != 0 and bool(_entries_here())


def keep_cuda() -> bool:
    """Make PyTorch forget that a device from outside could be the accelerator.

    Call it after the device has its name. Calling it again changes nothing.

    Returns:
        Whether the entry was found and changed.
    """
    target = _answer()
    entries = _entries_here() if target else []
    for entry in entries:
        _write(entry, target)
    return bool(entries)


def _answer() -> int:
    """The address of a function that returns 0; 0 where there is none."""
    if not sys.platform.startswith("linux") or ctypes.sizeof(ctypes.c_void_p) != 8:
        return 0
    answer = getattr(ctypes.CDLL(None), _ANSWERS_ZERO, None)
    if answer is None or answer() != 0:
        return 0
    return ctypes.cast(answer, ctypes.c_void_p).value or 0


def _entries_here() -> list[int]:
    image = _find_library()
    return [] if image is None else _entries(image)


def _find_library() -> _Image | None:
    found: list[_Image] = []
    callback = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.POINTER(_Loaded), ctypes.c_size_t, ctypes.c_void_p
    )

    def visit(loaded: "ctypes._Pointer[_Loaded]", size: int, data: object) -> int:
        info = loaded.contents
        if Path((info.name or b"").decode()).name == _LIBRARY:
            found.append(_Image(info.base, _dynamic_section(info)))
        return len(found)

    ctypes.CDLL(None).dl_iterate_phdr(callback(visit), None)
    return found[0] if found else None


def _dynamic_section(info: _Loaded) -> dict[int, int]:
    for number in range(info.num_headers):
        header = info.headers[number]
        if header.kind == _PT_DYNAMIC:
            words = _read(info.base + header.address, header.memory_bytes, "<u8")
            pairs = words.reshape(-1, 2)
            return {int(tag): int(value) for tag, value in pairs if tag}
    return {}


def _entries(image: _Image) -> list[int]:
    """Addresses of the pointers through which the library asks the question."""
    dynamic = image.dynamic
    if not {_DT_STRTAB, _DT_STRSZ, _DT_SYMTAB} <= dynamic.keys():
        return []
    tables = [
        _read(dynamic[where], dynamic[size], _RELOCATION)
        for where, size in ((_DT_JMPREL, _DT_PLTRELSZ), (_DT_RELA, _DT_RELASZ))
        if where in dynamic and size in dynamic
    ]
    if not tables:
        return []
    relocations = np.concatenate(tables)
    symbols = (relocations["info"] >> np.uint64(32)).astype(np.int64)
    count = int(symbols.max()) + 1
    names = _read(dynamic[_DT_SYMTAB], count * _SYMBOL.itemsize, _SYMBOL)["name"]
    strings = ctypes.string_at(dynamic[_DT_STRTAB], dynamic[_DT_STRSZ])
    start = strings.find(b"\0" + _QUESTION + b"\0") + 1
    if start == 0:
        return []
    asked = np.isin(symbols, np.flatnonzero(names == start)) & (symbols > 0)
    return [image.base + int(offset) for offset in relocations["offset"][asked]]


def _read(address: int, num_bytes: int, dtype: Any) -> Any:
    """An array over memory of this process."""
    buffer = (ctypes.c_uint8 * num_bytes).from_address(address)
    return np.frombuffer(memoryview(buffer), dtype=dtype)


def _write(entry: int, value: int) -> None:
    page = entry - entry % _PAGE_BYTES
    libc = ctypes.CDLL(None, use_errno=True)
    # The table may have been made read-only after loading.
    if libc.mprotect(
        ctypes.c_void_p(page), ctypes.c_size_t(_PAGE_BYTES), ctypes.c_int(_READ_WRITE)
    ):
        raise OSError(ctypes.get_errno(), "mprotect of the table of imports failed")
    ctypes.c_uint64.from_address(entry).value = value
