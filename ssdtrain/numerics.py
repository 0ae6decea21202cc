"""Settings of torch that decide which bits an operator gives.

[Note: numerics]
Forward may run under other settings than backward: attention's backends, TF32, oneDNN,
deterministic algorithms, flushed denormals. What is made again in backward is made
under those of its forward.
(tests/ssdtrain/regions/test_regions.py, tests/ssdtrain/remat/test_surroundings.py)
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Setting = tuple[Callable[[], Any], Callable[[Any], Any]]
Numerics = tuple[Any, ...]
_SMALLEST = 2.2250738585072014e-308
"""The smallest normal double."""


def _deterministic() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _cudnn() -> tuple[bool, bool, bool]:
    flags = torch.backends.cudnn
    return flags.enabled, flags.benchmark, flags.deterministic


def _set_cudnn(value: tuple[bool, bool, bool]) -> None:
    flags: Any = torch.backends.cudnn
    flags.enabled, flags.benchmark, flags.deterministic = value


def _precision() -> str | None:
    """Of float32 products; None: set by the newer interface, which is left alone."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _set_precision(value: str | None) -> None:
    if value is not None:
        torch.set_float32_matmul_precision(value)


def _reduced() -> tuple[Any, Any]:
    flags = torch.backends.cuda.matmul
    return (
        flags.allow_bf16_reduced_precision_reduction,
        flags.allow_fp16_reduced_precision_reduction,
    )


def _set_reduced(value: tuple[Any, Any]) -> None:
    flags: Any = torch.backends.cuda.matmul
    flags.allow_bf16_reduced_precision_reduction = value[0]
    flags.allow_fp16_reduced_precision_reduction = value[1]


def _flushes() -> bool:
    """Whether this thread flushes denormals to zero; torch has no question for it."""
    return _SMALLEST / 2 == 0.0


SETTINGS: tuple[Setting, ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (_deterministic, _set_deterministic),
    (_cudnn, _set_cudnn),
    (_precision, _set_precision),
    (_reduced, _set_reduced),
    (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    (torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
)
ON_CPU: tuple[Setting, ...] = (
    *SETTINGS,
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    (_flushes, torch.set_flush_denormal),
    (torch.get_num_threads, torch.set_num_threads),
)


def numerics(device: torch.device) -> Numerics:
    """The settings that hold here, as far as they matter to kernels of this device."""
    return tuple(read() for read, _ in _settings(device))


@contextmanager
def restored(wanted: Numerics | None, device: torch.device) -> Iterator[None]:
    """A block under these settings; None: under those that hold."""
    before = () if wanted is None else numerics(device)
    if wanted is None or before == wanted:
        yield
        return
    try:
        _set(wanted, before, device)
        yield
    finally:
        _set(before, wanted, device)


def _settings(device: torch.device) -> tuple[Setting, ...]:
    return ON_CPU if device.type == "cpu" else SETTINGS


def _set(wanted: Numerics, present: Numerics, device: torch.device) -> None:
    found = zip(_settings(device), wanted, present, strict=True)
    for (_, write), value, now in found:
        if value != now:
            write(value)
