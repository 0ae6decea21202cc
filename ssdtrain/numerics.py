"""Settings of torch that decide which bits an operator gives.

[Note: numerics]
Forward may run under other settings than backward: attention's backends, TF32, oneDNN,
deterministic algorithms, flushed denormals. What is made again in backward is made
under those of its forward. They are read at every tensor that a expensive recipe makes,
so by torch's own functions after the public ones, which take a tenth of the time.
One setting changes by itself: at a process's first attention on a GPU torch puts
cuDNN's before the others where it is faster. `settle` has it do so before anything is
read; else the first forward would be one of an order that it did not run under.
(tests/ssdtrain/regions/test_regions.py, tests/ssdtrain/rebuild/test_surroundings.py)
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

Setting = tuple[Callable[[], Any], Callable[[Any], Any]]
Numerics = tuple[Any, ...]
_SMALLEST = 2.2250738585072014e-308
"""The smallest normal double."""
_C: Any = torch._C


def _set_deterministic(value: bool) -> None:
    warns = _C._get_deterministic_algorithms_warn_only()
    torch.use_deterministic_algorithms(value, warn_only=warns)


def _set_warning(value: bool) -> None:
    is_on = _C._get_deterministic_algorithms()
    torch.use_deterministic_algorithms(is_on, warn_only=value)


def _precision() -> str | None:
    """Of float32 products; None: set by the newer interface alone, which says all."""
    try:
        found: str = _C._get_float32_matmul_precision()
    except RuntimeError:
        return None
    return found


def _set_precision(value: str | None) -> None:
    if value is not None:
        _C._set_float32_matmul_precision(value)


def _set_reduced(name: str, value: Any) -> None:
    """bool, or whether products may be reduced so and split so."""
    pair = value if isinstance(value, tuple) else (value,)
    getattr(_C, name)(*pair)


def _flushes() -> bool:
    """Whether this thread flushes denormals to zero; torch has no question for it."""
    return _SMALLEST / 2 == 0.0


def _both(name: str) -> tuple[Setting, ...]:
    """`torch._C._get_name` and `_set_name`; none where this torch has none."""
    read = getattr(_C, f"_get_{name}", None)
    write = getattr(_C, f"_set_{name}", None)
    return () if read is None or write is None else ((read, write),)


def _reduced(name: str) -> tuple[Setting, ...]:
    name = f"cublas_allow_{name}_reduced_precision_reduction"
    return ((getattr(_C, f"_get_{name}"), partial(_set_reduced, f"_set_{name}")),)


def _backend(name: str) -> tuple[Setting, ...]:
    """Of attention."""
    write = getattr(_C, f"_set_sdp_use_{name}", None)
    read = getattr(_C, f"_get_{name}_sdp_enabled", None)
    return () if read is None or write is None else ((read, write),)


def _precisions(*places: tuple[str, str]) -> tuple[Setting, ...]:
    """Of float32, by backend and operator; the ones that others inherit from first."""
    read, write = _C._get_fp32_precision_getter, _C._set_fp32_precision_setter
    return tuple((partial(read, *each), partial(write, *each)) for each in places)


SETTINGS: tuple[Setting, ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (_C._get_deterministic_algorithms, _set_deterministic),
    (_C._get_deterministic_algorithms_warn_only, _set_warning),
    (_precision, _set_precision),
    *_precisions(("generic", "all")),
)
ON_GPU: tuple[Setting, ...] = (
    *SETTINGS,
    *_both("cudnn_enabled"),
    *_both("cudnn_benchmark"),
    *_both("cudnn_deterministic"),
    *_precisions(("cuda", "all"), ("cuda", "matmul")),
    *_precisions(("cuda", "conv"), ("cuda", "rnn")),
    *_reduced("bf16"),
    *_reduced("fp16"),
    *_both("cublas_allow_fp16_accumulation"),
    *_both("blas_preferred_backend"),
    *_both("linalg_preferred_backend"),
    *_backend("flash"),
    *_backend("mem_efficient"),
    *_backend("math"),
    *_backend("cudnn"),
    *_both("math_sdp_allow_fp16_bf16_reduction"),
    *_both("sdp_priority_order"),
)
ON_CPU: tuple[Setting, ...] = (
    *SETTINGS,
    *_backend("flash"),
    *_backend("math"),
    *_both("mkldnn_enabled"),
    *_both("mkldnn_deterministic"),
    *_both("nnpack_enabled"),
    *_precisions(("mkldnn", "all"), ("mkldnn", "matmul")),
    *_precisions(("mkldnn", "conv"), ("mkldnn", "rnn")),
    *_both("cpu_allow_fp16_reduced_precision_reduction"),
    (_flushes, torch.set_flush_denormal),
    (torch.get_num_threads, torch.set_num_threads),
)
READS_ON_CPU = [read for read, _ in ON_CPU]
READS_ON_GPU = [read for read, _ in ON_GPU]


def settle(device: torch.device) -> None:
    """Have torch decide what it otherwise decides in its first attention."""
    if device.type == "cuda":
        query = torch.empty((1, 1, 8, 64), dtype=torch.float16, device=device)
        torch._fused_sdp_choice(query, query, query)


def numerics(device: torch.device) -> Numerics:
    """The settings that hold here, as far as they matter to kernels of this device."""
    reads = READS_ON_CPU if device.type == "cpu" else READS_ON_GPU
    return tuple([read() for read in reads])


@contextmanager
def restored(wanted: Numerics | None, device: torch.device) -> Iterator[None]:
    """A block under these settings; None: under those that hold."""
    before = () if wanted is None else numerics(device)
    if wanted is None or before == wanted:
        yield
        return
    try:
        put(wanted, device)
        yield
    finally:
        put(before, device)


def _settings(device: torch.device) -> tuple[Setting, ...]:
    return ON_CPU if device.type == "cpu" else ON_GPU


def put(wanted: Numerics, device: torch.device) -> None:
    """Write what differs; one write may change what the next one reads."""
    for (read, write), value in zip(_settings(device), wanted, strict=True):
        if read() != value:
            write(value)
