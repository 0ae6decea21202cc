"""A profile without a GPU: the model on the meta device, operators by kernel models.

The step is captured and priced as `ssdtrain foresight predict` does: the same
operators, kernel models, host times, clock and queues (docs/foresight.md). What the
planner needs beside them is noted meanwhile: what autograd saves, where it asks for it,
and the memory of everything else. Good for comparing placements and batch sizes before
there is a machine; a measured profile replaces it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ssdtrain.cache.identity import is_held
from ssdtrain.curves import Links
from ssdtrain.errors import ConfigError
from ssdtrain.plan.profile import ESTIMATED, Item, Mark, Phase, Profile
from ssdtrain.tools.foresight.capture import record
from ssdtrain.tools.foresight.caveats import left_out, parts_of
from ssdtrain.tools.foresight.device import Device
from ssdtrain.tools.foresight.price import price, steady
from ssdtrain.tools.foresight.recorder import Recorder
from ssdtrain.tools.foresight.simulate import KERNEL_GAP_US, Task
from ssdtrain.tools.foresight.spec import Kind

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


def estimate(
    model: nn.Module,
    forward: Callable[[], Any],
    links: Links,
    device: Device,
    *,
    min_bytes: int = 1 << 20,
) -> Profile:
    """Return the profile of one forward and backward.

    Args:
        model: its parameters are on the meta device.
        forward: runs it; gives a tensor, or a nest of them, that backward starts from.
        links: curves of the machine that is asked about.
        device: prices operators.
        min_bytes: smaller saved tensors are never moved.

    Raises:
        ConfigError: nothing was saved, nothing needs a gradient, or the step cannot be
            captured.
    """
    saved = _Saved(min_bytes)
    recorder = Recorder(model, saved.measure)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.pack(tensor, recorder),
        lambda packed: saved.unpack(packed, recorder),
    ):
        notes = record(recorder, forward, device.spec.kind)
    if not saved.items:
        raise ConfigError(
            f"no saved tensor of at least {min_bytes} bytes was seen; set --min-bytes "
            "lower, or give a larger --micro-batch."
        )
    graph = recorder.graph({**notes, **parts_of(model, forward)})
    priced = price(graph, device)
    found = steady(priced, device)
    by = f"kernel models of {device.spec.name}, {priced.generic.total()} operators"
    by += " priced as copies"
    if left_out(graph.notes):
        by += (
            "; `ssdtrain foresight predict` says what is left out of this model's step"
        )
    return saved.profile(
        found.tasks,
        links=links,
        # A CPU runs its kernels itself: no host beside it.
        is_hosted=device.spec.kind is Kind.CUDA,
        host_lead_ms=found.host_lead_us / 1e3,
        notes={
            ESTIMATED: by,
            "clock": f"{found.clock:.3f}",
        },
    )


@dataclass(frozen=True)
class _Kept:
    """An item whose times are not known yet."""

    item: Item
    maker: int | None
    """The operator that a recipe runs again."""


@dataclass
class _Draft:
    """A mark whose operators are still being collected."""

    phase: Phase
    item: int
    at: int
    """Operators that ran before it."""
    other_bytes: int = 0


class _Saved:
    """The items, as autograd saves them, and the marks between operators."""

    def __init__(self, min_bytes: int) -> None:
        self.items: list[_Kept] = []
        self._marks: list[_Draft] = []
        self._min_bytes = min_bytes
        self._item_of: dict[int, int] = {}
        """By storage."""
        self._counted: set[int] = set()
        """Storages of items, which are no other memory."""

    def pack(self, tensor: Tensor, recorder: Recorder) -> tuple[Tensor, int | None]:
        """Record the tensor if it is an item; autograd keeps the tensor itself."""
        with recorder.unnoticed():
            detached = tensor.detach()
        if _is_parameter(tensor):
            return detached, None
        storage = recorder.storage_of(tensor)
        size = tensor.untyped_storage().nbytes()
        is_known = is_held(tensor) or recorder.maker_of(storage) is not None
        if not is_known or size < self._min_bytes:
            return detached, None
        if storage not in self._item_of:
            number = self._item_of[storage] = len(self.items)
            self.items.append(self._kept(tensor, storage, recorder))
            if not self.items[number].item.held:
                self._counted.add(storage)
            self._open(Phase.FORWARD, number, recorder)
        return detached, self._item_of[storage]

    def unpack(self, packed: tuple[Tensor, int | None], recorder: Recorder) -> Tensor:
        """Record that backward uses the tensor."""
        tensor, item = packed
        recorder.ignore_detach()
        if item is not None:
            self._open(Phase.BACKWARD, item, recorder)
        return tensor

    def measure(self, recorder: Recorder) -> None:
        """Record the memory in use beside the items."""
        if self._marks:
            alive, counted = recorder.alive, self._counted
            other = sum(n for storage, n in alive.items() if storage not in counted)
            mark = self._marks[-1]
            mark.other_bytes = max(mark.other_bytes, other)

    def _open(self, phase: Phase, item: int, recorder: Recorder) -> None:
        self._marks.append(_Draft(phase, item, recorder.num_nodes))
        self.measure(recorder)

    def _kept(self, tensor: Tensor, storage: int, recorder: Recorder) -> _Kept:
        producer = "input" if tensor.grad_fn is None else tensor.grad_fn.name()
        maker = recorder.maker_of(storage)
        inputs = None if maker is None else self._inputs(recorder.read_by(maker))
        operator = None if maker is None else recorder.name_of(maker)
        rebuilds = operator in CHEAP and inputs is not None
        item = Item(
            name=f"{producer} [{'x'.join(map(str, tensor.shape))}]",
            num_bytes=tensor.untyped_storage().nbytes(),
            module=recorder.module,
            held=is_held(tensor),
            recipe=operator if rebuilds else None,
            inputs=inputs if rebuilds and inputs is not None else (),
        )
        return _Kept(item, maker if rebuilds else None)

    def _inputs(self, storages: Sequence[int]) -> tuple[int, ...] | None:
        found = {self._item_of.get(storage) for storage in storages}
        if None in found or not found:
            return None
        return tuple(sorted(item for item in found if item is not None))

    def profile(
        self, tasks: Sequence[Task], *, is_hosted: bool, **more: Any
    ) -> Profile:
        """Make the profile: add kernel times to marks and recipes.

        Args:
            tasks: of every operator.
            is_hosted: host times are a queue of their own.
            more: fields of `Profile`.
        """
        ends = [*(mark.at for mark in self._marks[1:]), len(tasks)]

        def host_ms(start: int, end: int) -> float:
            return _host_ms(tasks[start:end]) if is_hosted else 0.0

        def device_ms(start: int, end: int) -> float:
            beside = 0.0 if is_hosted else _host_ms(tasks[start:end])
            return _device_ms(tasks[start:end]) + beside

        marks = tuple(
            Mark(
                lane=0,
                phase=mark.phase,
                item=mark.item,
                ms=device_ms(mark.at, end),
                host_ms=host_ms(mark.at, end),
                other_bytes=mark.other_bytes,
            )
            for mark, end in zip(self._marks, ends, strict=True)
        )
        items = tuple(
            kept.item
            if kept.maker is None
            else _rebuilt(
                kept.item,
                device_ms(kept.maker, kept.maker + 1),
                host_ms(kept.maker, kept.maker + 1),
            )
            for kept in self.items
        )
        first = self._marks[0].at
        return Profile(
            lanes=("model/0",),
            kinds={"model/0": items},
            marks=marks,
            head_ms=device_ms(0, first),
            head_host_ms=host_ms(0, first),
            device="meta",
            **more,
        )


def _rebuilt(item: Item, device_ms: float, host_ms: float) -> Item:
    return replace(item, recipe_ms=device_ms, recipe_host_ms=host_ms)


def _device_ms(tasks: Sequence[Task]) -> float:
    lengths = [task.device_us for task in tasks if task.device_us > 0.0]
    return (sum(lengths) + KERNEL_GAP_US * len(lengths)) / 1e3


def _host_ms(tasks: Sequence[Task]) -> float:
    return sum(task.host_us + task.host_after_us for task in tasks) / 1e3


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
