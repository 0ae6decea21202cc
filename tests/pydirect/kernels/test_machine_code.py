"""What the compiler makes of gather.cu: no GPU, but NVRTC and a disassembler."""

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pydirect.kernels import gather as kernels
from pydirect.kernels import nvrtc

SOURCE = Path(kernels.__file__).with_name("gather.cu")


def disassembler() -> str:
    """cuobjdump of a toolkit, or the one that comes with Triton."""
    found = shutil.which("cuobjdump")
    package = importlib.util.find_spec("triton")
    for place in (package.submodule_search_locations or []) if package else []:
        beside = Path(place) / "backends" / "nvidia" / "bin"
        found = found or shutil.which("cuobjdump", path=beside)
    if found is None:
        pytest.skip("needs cuobjdump")
    return found


@pytest.fixture
def cubin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """gather.cu for an H200."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", torch.version.cuda or "13.0")
    nvrtc._library.cache_clear()
    try:
        nvrtc._library()
    except nvrtc.KernelCompileError:
        pytest.skip("needs NVRTC")
    built = tmp_path / "gather.cubin"
    built.write_bytes(nvrtc.compile_cubin(SOURCE, "sm_90", ()))
    yield built
    nvrtc._library.cache_clear()


def test_every_load_is_in_front_of_the_first_store(cubin: Path) -> None:
    """See [Note: Loads before stores]: otherwise fewer loads are in flight."""
    in_flight = {"w16_long": 8, "w16_short": 8, "w4_long": 18, "w4_short": 8}
    for kernel, loads in in_flight.items():
        command = [disassembler(), "-sass", "-fun", f"gather_i64_{kernel}", cubin]
        ran = subprocess.run(command, check=True, capture_output=True, text=True)
        moves = re.findall(r"LDG\.E\.NA|STG\.E(?!\S*STRONG)", ran.stdout)
        assert moves == ["LDG.E.NA"] * loads + ["STG.E"] * loads, kernel


def test_a_pytorch_without_cuda_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", None)
    nvrtc._library.cache_clear()
    with pytest.raises(nvrtc.KernelCompileError, match="built without CUDA"):
        nvrtc.compile_cubin(SOURCE, "sm_90", ())
