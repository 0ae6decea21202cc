"""The CUDA runtime's library: what it says of an error, and where there is none."""

from types import SimpleNamespace
from typing import Any

import pytest

from ssdtrain.transfer.native import Runtime, library, loaded


class Text:
    """`cudaGetErrorString`, as `ctypes` gives it."""

    restype: Any = None
    argtypes: Any = None

    def __call__(self, status: int) -> bytes:
        return b"out of luck"


def test_what_cuda_says_is_raised() -> None:
    runtime = Runtime(SimpleNamespace(cudaGetErrorString=Text()))
    with pytest.raises(RuntimeError, match=r"out of luck \(CUDA error 700\)"):
        runtime.fail(700)


def test_without_a_runtime_torch_copies() -> None:
    if library() is None:
        assert loaded() is None
    else:
        assert isinstance(loaded(), Runtime)
