"""Which way does cuFile register a file here? One way a process; one JSON line.

    python -m recipes.bench.storage.cufile_probe WAY DIRECTORY

Ways: `raw` calls libcufile itself, `raw-closed` likewise after the driver was opened
and closed once, `kvikio` opens through kvikio, `kvikio-closed` after its driver was.
"""

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from ssdtrain.storage.kvikio_shim import GdsMode, KvikioFile

MIB = 1024 * 1024


class Result(ctypes.Structure):
    """CUfileError_t."""

    _fields_ = [("error", ctypes.c_int), ("cuda", ctypes.c_int)]


class Descriptor(ctypes.Structure):
    """CUfileDescr_t with a file descriptor."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("fd", ctypes.c_void_p),
        ("operations", ctypes.c_void_p),
    ]


def raw(path: Path, closed: bool) -> dict[str, Any]:
    """Every call's own return code."""
    library = ctypes.CDLL("libcufile.so.0")
    for name in ("DriverOpen", "DriverClose", "HandleRegister", "BufRegister"):
        getattr(library, f"cuFile{name}").restype = Result
    library.cuFileWrite.restype = ctypes.c_ssize_t
    library.cuFileWrite.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int64,
        ctypes.c_int64,
    ]
    codes: dict[str, Any] = {"open": library.cuFileDriverOpen().error}
    if closed:
        codes["close"] = library.cuFileDriverClose().error
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    handle, descriptor = ctypes.c_void_p(), Descriptor(1, fd, None)
    code = library.cuFileHandleRegister(ctypes.byref(handle), ctypes.byref(descriptor))
    codes["register"] = code.error
    if code.error == 0:
        buffer = torch.ones(MIB, dtype=torch.uint8, device="cuda")
        address = ctypes.c_void_p(buffer.data_ptr())
        size = ctypes.c_size_t(MIB)
        codes["buffer"] = library.cuFileBufRegister(address, size, 0).error
        codes["write"] = library.cuFileWrite(handle, address, MIB, 0, 0)
        codes["right"] = path.read_bytes() == b"\x01" * MIB
    return codes


def through_kvikio(path: Path, closed: bool) -> dict[str, Any]:
    """Whether kvikio opens the file, or its own words."""
    import kvikio.cufile_driver as driver

    if closed:
        driver.driver_open()
        driver.driver_close()
    try:
        KvikioFile(str(path), GdsMode.CUFILE_COMPAT).close()
    except OSError as error:
        return {"error": str(error)}
    return {"opens": True}


def main() -> None:
    """Probe one way."""
    way, directory = sys.argv[1], Path(sys.argv[2])
    torch.zeros(1, device="cuda")
    path = directory / f"probe-{os.getpid()}"
    path.write_bytes(bytes(MIB))
    try:
        probe = raw if way.startswith("raw") else through_kvikio
        print(json.dumps(probe(path, way.endswith("closed"))))
    finally:
        path.unlink()


if __name__ == "__main__":
    main()
