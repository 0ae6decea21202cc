"""The CUDA runtime's calls, against a library that only writes down what it hears."""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from ssdtrain.transfer.runtime import ADDRESS, TO_HOST, Runtime, library, loaded


class Function:
    """One of the library's, as `ctypes` gives it."""

    restype: Any = None
    argtypes: Any = None

    def __init__(self, status: Any) -> None:
        self._status = status

    def __call__(self, *arguments: Any) -> Any:
        return self._status


def fake(status: int) -> Runtime:
    names = "cudaEventRecord", "cudaStreamWaitEvent", "cudaMemcpyAsync"
    functions = {name: Function(status) for name in names}
    return Runtime(
        SimpleNamespace(**functions, cudaGetErrorString=Function(b"out of luck"))
    )


def types_of(function: Any) -> Any:
    """What a function of ctypes takes; to us it is a callable only."""
    return function.argtypes


def test_arguments_are_as_wide_as_the_runtime_takes_them() -> None:
    """`ctypes` would otherwise cut addresses to 32 bits."""
    runtime = fake(0)
    assert types_of(runtime.record) == [ADDRESS, ADDRESS]
    assert types_of(runtime.wait) == [ADDRESS, ADDRESS, ctypes.c_uint]
    assert types_of(runtime.copy) == [
        *(ADDRESS, ADDRESS, ctypes.c_size_t, ctypes.c_int, ADDRESS)
    ]
    assert runtime.copy(1, 2, 3, TO_HOST, 4) == 0


def test_what_cuda_says_is_raised() -> None:
    runtime = fake(700)
    assert runtime.record(1, 2) == 700
    with pytest.raises(RuntimeError, match=r"out of luck \(CUDA error 700\)"):
        runtime.fail(700)


def test_without_a_runtime_torch_copies() -> None:
    if library() is None:
        assert loaded() is None
    else:
        assert isinstance(loaded(), Runtime)
