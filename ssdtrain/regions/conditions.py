"""What a forward runs under, and how to run it under the same again.

[Note: conditions of a re-run]
Backward runs outside the contexts of forward: autocast is off, gradients are off,
settings are the defaults ([Note: numerics] in numerics.py), and the model may have been
set to `eval()` meanwhile. A re-run gets all of them back, and the random states that
the forward began with; when it has ended, those of backward stand again. If a forward
that draws does not end where it ended before, somebody else draws from the same
generator, and the masks are not the forward's.
(tests/ssdtrain/regions/test_regions.py)
"""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._device import DeviceContext

from ssdtrain.numerics import Numerics, numerics, put, restored


class Autocast(tuple[str, bool, torch.dtype]):
    """Autocast of one type of device: the type, whether it is on, and its dtype. A
    tuple: made without a call of Python."""

    __slots__ = ()


class Conditions(NamedTuple):
    """Of one call of a forward. See [Note: conditions of a re-run]."""

    autocasts: tuple[Autocast, ...]
    caches: bool
    """Whether autocast caches the weights that it casts."""
    settings: Numerics
    device: torch.device
    default_device: torch.device | None
    """Where tensors are made that name no device; None: torch's own default."""

    @classmethod
    def now(cls, device: torch.device) -> "Conditions":
        """Those that hold here."""
        kinds = ("cpu",) if device.type == "cpu" else (device.type, "cpu")
        enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
        autocasts = tuple(
            [Autocast((kind, enabled(kind), dtype(kind))) for kind in kinds]
        )
        caches = torch.is_autocast_cache_enabled()
        default = default_device() if torch._C._len_torch_function_stack() else None
        # Not by its name: a call of Python more, three times a call of a region.
        return tuple.__new__(
            cls, (autocasts, caches, numerics(device), device, default)
        )

    def restored(self) -> "Restored":
        """A block under these conditions, with gradients on. After it those of before
        hold, whatever it has set: it may have been left in the middle."""
        return Restored(self)

    def enter(self, stack: ExitStack, now: "Conditions") -> None:
        """Enter what these differ in from those that hold now."""
        for wanted, present in zip(self.autocasts, now.autocasts, strict=True):
            device_type, enabled, dtype = wanted
            if wanted != present or self.caches != now.caches:
                stack.enter_context(
                    torch.autocast(
                        device_type,
                        dtype=dtype,
                        enabled=enabled,
                        cache_enabled=self.caches,
                    )
                )
        if self.default_device is not None:
            stack.enter_context(self.default_device)
        stack.enter_context(restored(self.settings, self.device))

    def put(self) -> None:
        """Set them, whatever holds now."""
        for device_type, enabled, dtype in self.autocasts:
            torch.set_autocast_enabled(device_type, enabled)
            torch.set_autocast_dtype(device_type, dtype)
        torch.set_autocast_cache_enabled(self.caches)
        put(self.settings, self.device)


class Restored:
    """See `Conditions.restored`. No generator: each re-run enters one."""

    __slots__ = ("_before", "_grad", "_stack", "_wanted")

    def __init__(self, wanted: Conditions) -> None:
        self._wanted = wanted

    def __enter__(self) -> None:
        wanted = self._wanted
        self._before = now = Conditions.now(wanted.device)
        self._grad = torch.is_grad_enabled()
        self._stack: ExitStack | None = None
        if now != wanted:
            with ExitStack() as stack:  # what was entered is left if another fails
                wanted.enter(stack, now)
                self._stack = stack.pop_all()
        torch._C._set_grad_enabled(True)

    def __exit__(self, *error: object) -> None:
        torch._C._set_grad_enabled(self._grad)
        try:
            if self._stack is not None:
                self._stack.close()
        finally:
            before = self._before
            if Conditions.now(before.device) != before:
                before.put()


class RandomState(NamedTuple):
    """Of the generators that torch's operators draw from by default."""

    cpu: Tensor
    cuda: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> "RandomState":
        """As it is; no wait for the device."""
        cuda = None
        if device.type == "cuda":
            cuda = torch.cuda.default_generators[device.index or 0].get_state()
        cpu = torch.default_generator.get_state()
        return tuple.__new__(cls, (cpu, cuda))  # as `Conditions.now` does

    def is_same(self, other: "RandomState") -> bool:
        """Whether nothing was drawn between two states."""
        if not torch.equal(self.cpu, other.cpu):
            return False
        if self.cuda is None or other.cuda is None:
            return self.cuda is other.cuda
        return torch.equal(self.cuda, other.cuda)

    def restore(self, device: torch.device) -> None:
        """Draw from here on."""
        torch.default_generator.set_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.default_generators[device.index or 0].set_state(self.cuda)


def default_device() -> torch.device | None:
    """What `torch.set_default_device` or `with torch.device(...)` has set; None: it is
    not set. Torch keeps it at the bottom of the function modes."""
    if not torch._C._len_torch_function_stack():
        return None
    mode = torch._C._get_function_stack_at(0)
    return mode.device if isinstance(mode, DeviceContext) else None


COLLECTING = "transformers.utils.output_capturing"
"""Its hooks on the layers of a model append to what a variable of the context holds,
from the model's forward on: also of a backward in it."""


def without_collector() -> AbstractContextManager[None]:
    """Around a re-run: nothing is collected in it."""
    collector: Any = getattr(sys.modules.get(COLLECTING), "_active_collector", None)
    if collector is None or collector.get() is None:
        return nullcontext()
    return _collecting_nothing(collector)


@contextmanager
def _collecting_nothing(collector: Any) -> Iterator[None]:
    if getattr(collector, "compiling", False):  # then it is a global variable
        own = vars(collector)
        before, own["global_var"] = own["global_var"], None
        try:
            yield
        finally:
            own["global_var"] = before
        return
    token = collector.set(None)
    try:
        yield
    finally:
        collector.reset(token)


def modes_stand() -> bool:
    """Whether a function or dispatch mode sees every operator: it would not see those
    of a re-run. A default device is put back for it instead."""
    if torch._C._len_torch_dispatch_stack():
        return True
    num = torch._C._len_torch_function_stack()
    return num > (default_device() is not None)
