"""What a forward runs under, and how to run it under the same again.

[Note: conditions of a re-run]
Backward runs outside the contexts of forward: autocast is off, gradients are off,
attention's backends are the defaults, and the model may have been set to `eval()`
meanwhile. A re-run gets all of them back. Random states are set back only for a forward
that draws, and set forward again behind it; if they do not end where the forward ended,
somebody else draws from the same generator, and the masks are not the forward's.
(tests/ssdtrain/regions/test_regions.py)
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

Setting = tuple[Callable[[], Any], Callable[[Any], Any]]


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


# Those that people change by context managers around a forward.
SETTINGS: tuple[Setting, ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (_deterministic, _set_deterministic),
    (_cudnn, _set_cudnn),
    (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    (torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
)


class Autocast(NamedTuple):
    """Autocast of one type of device."""

    device_type: str
    enabled: bool
    dtype: torch.dtype


class Conditions(NamedTuple):
    """Of one call of a forward. See [Note: conditions of a re-run]."""

    autocasts: tuple[Autocast, ...]
    caches: bool
    """Whether autocast caches the weights that it casts."""
    settings: tuple[Any, ...]

    @classmethod
    def now(cls, device: torch.device) -> "Conditions":
        """Those that hold here."""
        kinds = ("cpu",) if device.type == "cpu" else (device.type, "cpu")
        return cls(
            tuple(
                Autocast(
                    kind,
                    torch.is_autocast_enabled(kind),
                    torch.get_autocast_dtype(kind),
                )
                for kind in kinds
            ),
            torch.is_autocast_cache_enabled(),
            tuple(read() for read, _ in SETTINGS),
        )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """A block under these conditions, with gradients on."""
        before = [read() for read, _ in SETTINGS]
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for each in self.autocasts:
                stack.enter_context(
                    torch.autocast(
                        each.device_type,
                        dtype=each.dtype,
                        enabled=each.enabled,
                        cache_enabled=self.caches,
                    )
                )
            try:
                _set(self.settings, before)
                yield
            finally:
                _set(before, self.settings)


def _set(wanted: Any, present: Any) -> None:
    for (_, write), value, now in zip(SETTINGS, wanted, present, strict=True):
        if value != now:
            write(value)


class RandomState(NamedTuple):
    """Of the generators that torch's operators draw from by default."""

    cpu: Tensor
    cuda: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> "RandomState":
        """As it is; no wait for the device."""
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.get_rng_state(), cuda)

    def is_same(self, other: "RandomState") -> bool:
        """Whether nothing was drawn between two states."""
        if not torch.equal(self.cpu, other.cpu):
            return False
        if self.cuda is None or other.cuda is None:
            return self.cuda is other.cuda
        return torch.equal(self.cuda, other.cuda)

    def restore(self, device: torch.device) -> None:
        """Draw from here on."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, device)


def modes_stand() -> bool:
    """Whether a function or dispatch mode sees every operator: it would not see those
    of a re-run."""
    return bool(
        torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack()
    )
