"""A profile without a GPU: the model on the meta device, operators by kernel models.

With a device's kernel models (docs/foresight.md) every operator takes what they
predict, and a phase that the host binds takes the host's time. With rates alone it
takes the longer of its FLOPs over the device's rate and its bytes over the memory's
bandwidth. Memory is counted from the storages that the operators make. Good for
comparing placements and batch sizes before there is a machine; a measured profile
replaces it.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ssdtrain.cache.identity import is_held
from ssdtrain.curves import Links
from ssdtrain.errors import ConfigError
from ssdtrain.foresight.capture import AsOn, loss_of
from ssdtrain.foresight.device import Device
from ssdtrain.foresight.meter import OperatorMeter
from ssdtrain.foresight.overheads import Phase as HostPhase
from ssdtrain.plan.profile import Item, Mark, Phase, Profile

# Operators that recipes rebuild (docs/recipes.md), by name.
CHEAP = frozenset(
    (
        "aten::gelu",
        "aten::silu",
        "aten::tanh",
        "aten::sigmoid",
        "aten::pow",
        "aten::mul",
        "aten::native_layer_norm",
        "aten::_to_copy",
        "aten::clone",
    )
)
LAUNCH_MS = 0.004
# Between two kernels of one stream.
GAP_MS = 0.001


class Rates(Protocol):
    """Prices operators."""

    def operator_ms(self, call: "Called") -> float:
        """Predict the device time of one operator."""

    def host_ms(self, func: Any, phase: Phase) -> float:
        """Predict the host time of one operator; 0 where it is not known."""

    def slowdown(self, step_ms: float) -> float:
        """Return the kernels' slowdown where the power limit lowers the clock in such
        steps."""

    def describe(self) -> str:
        """Return where the times come from, for the profile's notes."""


class Called(NamedTuple):
    """One operator as it ran."""

    func: Any
    args: Any
    kwargs: Any
    out: Any
    inputs: Sequence[Tensor]
    results: Sequence[Tensor]


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """What the device reaches in practice."""

    tflops: float = 600.0
    """1e12 FLOPs a second in matrix products (an H200 in bf16)."""
    memory_gb_per_s: float = 3500.0
    """1e9 bytes a second of device memory."""

    def operator_ms(self, call: Called) -> float:
        """Return the roofline's time."""
        formula = flop_registry.get(call.func._overloadpacket)
        flops = (
            0
            if formula is None
            else formula(*call.args, **call.kwargs, out_val=call.out)
        )
        num_bytes = sum(tensor.nbytes for tensor in (*call.inputs, *call.results))
        compute_ms = flops / (self.tflops * 1e9)
        memory_ms = num_bytes / (self.memory_gb_per_s * 1e6)
        return max(compute_ms, memory_ms) + LAUNCH_MS

    def host_ms(self, func: Any, phase: Phase) -> float:
        """Return 0: not known."""
        return 0.0

    def slowdown(self, step_ms: float) -> float:
        """Return 1: the rates are what is reached."""
        return 1.0

    def describe(self) -> str:
        """Name both rates."""
        return f"{self.tflops} TFLOP/s, {self.memory_gb_per_s} GB/s"


class Learned:
    """A device's kernel models and host times."""

    def __init__(self, device: Device) -> None:
        self._name = device.spec.name
        self._meter = OperatorMeter(device)

    def operator_ms(self, call: Called) -> float:
        """Return what the kernel models predict."""
        us = self._meter.device_us(
            call.func, (call.args, call.kwargs), call.inputs, call.results
        )
        return us / 1e3 + (GAP_MS if us else 0.0)

    def host_ms(self, func: Any, phase: Phase) -> float:
        """Look up the device's table of host times."""
        known = HostPhase.FORWARD if phase is Phase.FORWARD else HostPhase.BACKWARD
        return self._meter.host_us(func, known) / 1e3

    def slowdown(self, step_ms: float) -> float:
        """See [Note: clocks] in foresight/power.py."""
        return self._meter.slowdown(step_ms * 1e3)

    def describe(self) -> str:
        """Name the device, and how many operators its models did not know."""
        unknown = self._meter.num_generic
        return f"kernel models of {self._name}, {unknown} operators priced as copies"


@dataclass
class _Made:
    """How a storage came about."""

    operator: str
    inputs: list[int]
    ms: float


@dataclass
class _Draft:
    """A mark that is still open."""

    phase: Phase
    item: int
    ms: float = 0.0
    other_bytes: int = 0


class _Meter(TorchDispatchMode):
    """Adds up time and memory of every operator."""

    def __init__(self, rates: Rates) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rates = rates
        self._phase = Phase.FORWARD
        self.host_ms = dict.fromkeys(Phase, 0.0)
        self.device_ms = dict.fromkeys(Phase, 0.0)
        self._numbers = 0
        self.sizes: dict[int, int] = {}
        """Bytes of every storage alive that an operator made."""
        self.saved: set[int] = set()
        self.made: dict[int, _Made] = {}
        self.marks: list[_Draft] = []
        self.head_ms = 0.0

    def number_of(self, tensor: Tensor) -> int | None:
        """Return the number of the tensor's storage; None if no operator made it."""
        stamp = getattr(tensor.untyped_storage(), "_ssdtrain_number", None)
        return None if stamp is None else stamp.number

    def adopt(self, leaf: Tensor) -> None:
        """Number what the caller made: no byte of the step, but recipes may read it."""
        if self.number_of(leaf) is None:
            self._stamp(leaf)

    def _stamp(self, tensor: Tensor) -> "_Stamp":
        storage: Any = tensor.untyped_storage()
        self._numbers += 1
        stamp = storage._ssdtrain_number = _Stamp(self._numbers)
        return stamp

    def open_mark(self, phase: Phase, item: int) -> None:
        """Count operators for this mark from now on."""
        self._phase = phase
        self.marks.append(_Draft(phase, item))
        self._measure()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        results = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        known = {x.untyped_storage()._cdata for x in inputs}
        new = [x for x in results if x.untyped_storage()._cdata not in known]
        writes = bool(new) or func._schema.is_mutable
        ms = 0.0  # of a view
        if writes:
            called = Called(func, args, kwargs or {}, out, inputs, results)
            ms = self._rates.operator_ms(called)
        self.device_ms[self._phase] += ms
        self.host_ms[self._phase] += self._rates.host_ms(func, self._phase)
        for tensor in new:
            self._track(tensor, func, inputs, ms)
        if self.marks:
            self.marks[-1].ms += ms
        else:
            self.head_ms += ms
        self._measure()
        return out

    def waiting(self, phase: Phase) -> float:
        """Return by which factor a phase is longer than its kernels at the highest
        clock: the host binds it, or the power limit lowers the clock."""
        if not self.device_ms[phase]:
            return 1.0
        longest = (max(self.host_ms[p], self.device_ms[p]) for p in Phase)
        slowdown = self._rates.slowdown(sum(longest))
        return max(slowdown, self.host_ms[phase] / self.device_ms[phase])

    def _track(
        self, tensor: Tensor, func: Any, inputs: Sequence[Tensor], ms: float
    ) -> None:
        stamp = self._stamp(tensor)
        number = stamp.number
        self.sizes[number] = tensor.untyped_storage().nbytes()
        weakref.finalize(stamp, self._gone, number)
        for x in inputs:
            if is_held(x) and not _is_parameter(x):
                self.adopt(x)
        sources = [self.number_of(x) for x in inputs if not _is_parameter(x)]
        if None not in sources:
            known = [source for source in sources if source is not None]
            self.made[number] = _Made(func._schema.name, known, ms)

    def _gone(self, number: int) -> None:
        self.sizes.pop(number, None)

    def _measure(self) -> None:
        if self.marks:
            other = sum(n for at, n in self.sizes.items() if at not in self.saved)
            mark = self.marks[-1]
            mark.other_bytes = max(mark.other_bytes, other)


class _Stamp:
    """Dies with its storage."""

    def __init__(self, number: int) -> None:
        self.number = number


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def estimate(
    model: nn.Module,
    forward: Callable[[], Any],
    links: Links,
    rates: Rates,
    *,
    min_bytes: int = 1 << 20,
) -> Profile:
    """Return the profile of one forward and backward.

    Args:
        model: its parameters are on the meta device.
        forward: runs it; gives a tensor, or a nest of them, that backward starts from.
        links: curves of the machine that is asked about.
        rates: prices operators on its device.
        min_bytes: smaller saved tensors are never moved.

    Raises:
        ConfigError: nothing was saved, or nothing needs a gradient.
    """
    meter, saved = _Meter(rates), _Saved(model, min_bytes)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    with (
        AsOn(),
        meter,
        torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: saved.pack(tensor, meter), lambda x: saved.unpack(x, meter)
        ),
    ):
        loss = loss_of(forward)
        grads = [torch.ones_like(x) for x in loss]
        torch.autograd.backward(loss, grads)
        del loss, grads
    if not saved.items:
        raise ConfigError(
            f"no saved tensor of at least {min_bytes} bytes was seen; set --min-bytes "
            "lower, or give a larger --micro-batch."
        )
    marks = tuple(
        Mark(
            lane=0,
            phase=m.phase,
            item=m.item,
            ms=m.ms * meter.waiting(m.phase),
            other_bytes=m.other_bytes,
        )
        for m in meter.marks
    )
    return Profile(
        lanes=("model/0",),
        kinds={"model/0": tuple(saved.items)},
        marks=marks,
        links=links,
        head_ms=meter.head_ms * meter.waiting(Phase.FORWARD),
        device="meta",
        notes={"estimated": rates.describe()},
    )


class _Saved:
    """The items, as autograd saves them."""

    def __init__(self, model: nn.Module, min_bytes: int) -> None:
        self.items: list[Item] = []
        self._min_bytes = min_bytes
        self._by_storage: dict[int, int] = {}
        self._names = {module: path for path, module in model.named_modules()}
        self._stack: list[str] = []
        for module, path in self._names.items():
            module.register_forward_pre_hook(lambda m, a, p=path: self._stack.append(p))
            module.register_forward_hook(lambda m, a, o: _drop(self._stack))

    def pack(self, tensor: Tensor, meter: _Meter) -> tuple[Tensor, int | None]:
        """Join the items, or not; the tensor is kept either way."""
        detached = tensor.detach()
        if _is_parameter(tensor):
            return detached, None
        if is_held(tensor):
            meter.adopt(tensor)
        number = meter.number_of(tensor)
        size = tensor.untyped_storage().nbytes()
        if number is None or size < self._min_bytes:
            return detached, None
        if number not in self._by_storage:
            item = len(self.items)
            self._by_storage[number] = item
            self.items.append(self._item(tensor, number, meter))
            if not self.items[item].held:
                meter.saved.add(number)
            meter.open_mark(Phase.FORWARD, item)
        return detached, self._by_storage[number]

    def unpack(self, packed: tuple[Tensor, int | None], meter: _Meter) -> Tensor:
        """Count a use."""
        tensor, item = packed
        if item is not None:
            meter.open_mark(Phase.BACKWARD, item)
        return tensor

    def _item(self, tensor: Tensor, number: int, meter: _Meter) -> Item:
        producer = "input" if tensor.grad_fn is None else tensor.grad_fn.name()
        made = meter.made.get(number)
        inputs = () if made is None else self._inputs(made)
        rebuilds = made is not None and made.operator in CHEAP and inputs is not None
        return Item(
            name=f"{producer} [{'x'.join(map(str, tensor.shape))}]",
            num_bytes=tensor.untyped_storage().nbytes(),
            module=self._stack[-1] if self._stack else "",
            held=is_held(tensor),
            recipe=made.operator if made is not None and rebuilds else None,
            recipe_ms=made.ms if made is not None and rebuilds else 0.0,
            inputs=inputs if rebuilds and inputs is not None else (),
        )

    def _inputs(self, made: _Made) -> tuple[int, ...] | None:
        found = {self._by_storage.get(number) for number in made.inputs}
        if None in found or not found:
            return None
        return tuple(sorted(item for item in found if item is not None))


def _drop(stack: list[str]) -> None:
    if stack:
        stack.pop()
