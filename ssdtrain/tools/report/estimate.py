"""A profile without a GPU: the model on the meta device, operators by kernel models, as
`ssdtrain foresight predict` has it (docs/foresight.md), and what autograd saves and
asks for. For comparing placements and batch sizes before there is a machine."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ssdtrain.cache.identity import is_held
from ssdtrain.curves import Links
from ssdtrain.errors import ConfigError
from ssdtrain.plan.profile import (
    ESTIMATED,
    AttentionPart,
    HostCost,
    HostCosts,
    Item,
    Mark,
    Phase,
    Profile,
    RegionRun,
)
from ssdtrain.regions.find import find_regions
from ssdtrain.tools.foresight.capture import record
from ssdtrain.tools.foresight.caveats import ASSUMED, WORDS, caveats_of, left_out
from ssdtrain.tools.foresight.device import DeviceCosts
from ssdtrain.tools.foresight.graph import Graph
from ssdtrain.tools.foresight.price import price, steady
from ssdtrain.tools.foresight.recorder import STATES, Recorder
from ssdtrain.tools.foresight.simulate import KERNEL_GAP_US, Task
from ssdtrain.tools.foresight.spec import Kind
from ssdtrain.tools.report.selective import MODE_VIEWS, StoredResult, kept_operators

# Operators that recipes rebuild (docs/recipes.md), by name.
CHEAP = frozenset(
    f"aten::{name}"
    for name in (
        *("gelu", "silu", "tanh", "sigmoid", "pow", "mul", "native_layer_norm"),
        *("_to_copy", "clone"),
    )
)
HOOKS = HostCosts(
    keep=HostCost(pack_ms=0.7, use_ms=0.3),
    host=HostCost(pack_ms=10.0, use_ms=8.0, load_ms=8.0),
    ssd=HostCost(pack_ms=17.0, use_ms=14.0, load_ms=14.0),
    rebuild=HostCost(pack_ms=10.0, use_ms=17.0),
    region_ms=35.0,
)
"""What hooks have taken the hosts of five H100s and H200s, in times of what a view of a
tensor takes the host there. A session measures its own."""


MOST_OPERATORS = 60_000
"""Of a step: 15 s or so."""


class Estimated(NamedTuple):
    """A step that no machine has run."""

    profile: Profile
    stored: tuple[StoredResult, ...]
    """By region call, what selective checkpointing stores."""
    num_operators: int
    caveats: tuple[str, ...]
    """What is priced otherwise than it runs, in words."""


def estimate(
    model: nn.Module,
    forward: Callable[[], Any],
    links: Links,
    device: DeviceCosts,
    *,
    min_bytes: int = 1 << 20,
    optimizer: str | None = None,
    keeps_gradients: bool = True,
) -> Estimated:
    """Return the profile of a step of a model on the meta device; repeated modules are
    regions. `forward`: gives what backward starts from; `min_bytes`: smaller tensors
    stay; `optimizer`: a key of `STATES`; `keeps_gradients`: they are there before the
    step. Raises ConfigError: nothing was saved or needs a gradient, or the step cannot
    be captured."""
    saved = _Saved(min_bytes)
    recorder = Recorder(model, saved.measure)
    for parameter in model.parameters():
        if parameter.requires_grad:
            made = torch.zeros_like(parameter) if keeps_gradients else None
            parameter.grad = made
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.pack(tensor, recorder),
        lambda packed: saved.unpack(packed, recorder),
    )
    with saved.calls(model, recorder), hooks:
        notes = record(recorder, forward, device.spec.kind)
    backward_end = recorder.num_nodes
    if optimizer is not None:
        recorder.update(optimizer)
    if not saved.items:
        raise ConfigError(
            f"no saved tensor of at least {min_bytes} bytes was seen, so nothing "
            "is worth moving; give more --tokens or a larger --micro-batch, or to "
            "plan and rok a lower --min-bytes."
        )
    graph = recorder.graph({**notes, **caveats_of(model, forward)})
    priced = price(graph, device)
    found = steady(priced, device)
    by = f"kernel models of {device.spec.name}, {priced.generic.total()} operators"
    by += " priced as copies"
    if left_out(graph.notes):
        by += "; `ssdtrain foresight predict` says what is left out of this model's "
        by += "step"
    num_states = STATES[optimizer] if optimizer is not None else 0
    base = device.context_bytes + sum(map(num_bytes_of, model.parameters()))
    trained = sum(num_bytes_of(p) for p in model.parameters() if p.requires_grad)
    # A CPU runs its kernels itself: no host beside it.
    is_hosted = device.spec.kind is Kind.CUDA
    mode_ms = MODE_VIEWS * device.host.view_us / 1e3 if is_hosted else 0.0
    profile = saved.profile(
        found.tasks,
        backward_end,
        base_bytes=base + trained * (num_states + keeps_gradients),
        rest_bytes=0 if keeps_gradients else trained,
        links=links,
        is_hosted=is_hosted,
        host_lead_ms=found.host_lead_us / 1e3,
        host_costs=HOOKS.times(device.host.view_us / 1e3),
        notes={ESTIMATED: by, "clock": f"{found.clock:.3f}"},
    )
    caveats = tuple(WORDS[name] for name in WORDS if name in {*graph.notes} - {ASSUMED})
    stored = saved.stored(graph, found.tasks, mode_ms)
    return Estimated(profile, stored, backward_end, caveats)


def num_bytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


@dataclass(frozen=True)
class _Kept:
    """An item whose times are not known yet."""

    item: Item
    maker: int | None
    """The operator that a recipe runs again."""
    source: int = -1
    """The operator that made it; -1: none."""


@dataclass
class _Draft:
    """A mark whose operators are still being collected."""

    phase: Phase
    item: int
    at: int
    """Operators that ran before it."""
    begin_bytes: int = 0
    """Memory next to the items as it begins."""
    other_bytes: int = 0
    """The most until it ends."""


@dataclass
class _Call:
    """A forward of a region."""

    module: str
    start: int
    """Operators that ran before it."""
    before_bytes: int
    """Memory that operators had made before it."""
    most_bytes: int = 0
    """The most meanwhile."""
    end: int = 0
    inputs: list[int] = field(default_factory=list)
    """Items that it reads."""


class _Saved:
    """The items, as autograd saves them, and the marks between operators."""

    def __init__(self, min_bytes: int) -> None:
        self._calls: list[_Call] = []
        self._call: int | None = None
        """The region call that runs."""
        self._attentions: set[int] = set()
        """Operators that compute attention."""
        self.items: list[_Kept] = []
        self._marks: list[_Draft] = []
        self._min_bytes = min_bytes
        self._item_of: dict[int, int] = {}
        """By storage."""

    @contextmanager
    def calls(self, model: nn.Module, recorder: Recorder) -> Iterator[None]:
        """Note the calls of the model's regions."""
        handles = []
        for region in find_regions(model):
            module, path = region.module, region.path

            def begin(m: Any, args: Any, kwargs: Any, path: str = path) -> None:
                self._begins(path, (args, kwargs), recorder)

            handles += [
                module.register_forward_pre_hook(begin, with_kwargs=True),
                module.register_forward_hook(lambda m, args, out: self._ends(recorder)),
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begins(self, path: str, arguments: Any, recorder: Recorder) -> None:
        if recorder.phase.value != Phase.FORWARD.value or self._call is not None:
            return  # checkpointed by the model itself, or inside another region
        self._call = len(self._calls)
        call = _Call(path, recorder.num_nodes, recorder.alive_bytes)
        self._calls.append(call)
        for tensor in tree_leaves(arguments):
            if not isinstance(tensor, Tensor) or _is_parameter(tensor):
                continue
            storage = recorder.storage_of(tensor)
            size = tensor.untyped_storage().nbytes()
            if recorder.maker_of(storage) is None or size < self._min_bytes:
                continue
            if storage not in self._item_of:
                self._add(tensor, storage, recorder, serves=self._call)
            number = self._item_of[storage]
            kept = self.items[number]
            if kept.item.region >= 0:  # its own region cannot make it in time
                self._change(number, region=-1)
            if number not in call.inputs:
                call.inputs.append(number)

    def _ends(self, recorder: Recorder) -> None:
        if self._call is not None and recorder.phase.value == Phase.FORWARD.value:
            self._calls[self._call].end = recorder.num_nodes
            self._call = None

    def _change(self, number: int, **values: Any) -> None:
        kept = self.items[number]
        self.items[number] = replace(kept, item=replace(kept.item, **values))

    def _add(
        self, tensor: Tensor, storage: int, recorder: Recorder, serves: int = -1
    ) -> None:
        number = self._item_of[storage] = len(self.items)
        self.items.append(self._kept(tensor, storage, recorder))
        if serves >= 0:
            self._change(number, serves=serves)
        elif self._call is not None:
            self._change(number, region=self._call)
        if not self.items[number].item.held:
            recorder.count_apart(storage)
        self._open(Phase.FORWARD, number, recorder)

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
            self._add(tensor, storage, recorder)
        elif self.items[self._item_of[storage]].item.serves >= 0:  # autograd's as well
            self._change(self._item_of[storage], serves=-1, floats=True)
        return detached, self._item_of[storage]

    def unpack(self, packed: tuple[Tensor, int | None], recorder: Recorder) -> Tensor:
        """Record that backward uses the tensor."""
        tensor, item = packed
        recorder.ignore_detach()
        if item is not None:
            self._open(Phase.BACKWARD, item, recorder)
        return tensor

    def measure(self, recorder: Recorder) -> None:
        """Record the memory in use next to the items. Raises ConfigError: the step has
        so many operators that the answer would take minutes."""
        if recorder.num_nodes > MOST_OPERATORS:
            within = f", now in {recorder.module}" if recorder.module else ""
            raise ConfigError(
                f"the step has more than {MOST_OPERATORS:,} operators{within}: is "
                "there a loop over tokens? On a GPU each takes the host about 5 us. "
                "Give a shorter sequence, or use one operator for the loop."
            )
        if self._marks:
            mark = self._marks[-1]
            mark.other_bytes = max(mark.other_bytes, recorder.other_bytes)
        if self._call is not None:
            call = self._calls[self._call]
            call.most_bytes = max(call.most_bytes, recorder.alive_bytes)

    def _open(self, phase: Phase, item: int, recorder: Recorder) -> None:
        self._marks.append(mark := _Draft(phase, item, recorder.num_nodes))
        self.measure(recorder)
        mark.begin_bytes = mark.other_bytes

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
        if maker is not None and operator is not None and "attention" in operator:
            self._attentions.add(maker)
        return _Kept(item, maker if rebuilds else None, -1 if maker is None else maker)

    def _inputs(self, storages: Sequence[int]) -> tuple[int, ...] | None:
        found = {self._item_of.get(storage) for storage in storages}
        if None in found or not found:
            return None
        return tuple(sorted(item for item in found if item is not None))

    def profile(
        self, tasks: Sequence[Task], backward_end: int, *, is_hosted: bool, **more: Any
    ) -> Profile:
        """Make the profile: add kernel times to marks, regions and recipes.
        `is_hosted`: host times are a queue of their own; `more`: fields of
        `Profile`."""
        ends = [*(mark.at for mark in self._marks[1:]), backward_end]

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
            # What is stored for a re-run alone is nothing that a recipe may read.
            replace(kept.item, recipe=None, inputs=())
            if any(self.items[each].item.serves >= 0 for each in kept.item.inputs)
            else kept.item
            if kept.maker is None
            else replace(
                kept.item,
                recipe_ms=device_ms(kept.maker, kept.maker + 1),
                recipe_host_ms=host_ms(kept.maker, kept.maker + 1),
            )
            for kept in self.items
        )
        first = self._marks[0].at
        regions = tuple(
            RegionRun(
                module=call.module,
                inputs=tuple(call.inputs),
                ms=device_ms(call.start, call.end),
                host_ms=host_ms(call.start, call.end),
                other_bytes=call.most_bytes - call.before_bytes + beside,
                parts=self._parts(number, device_ms),
            )
            for (number, call), beside in zip(
                enumerate(self._calls), self._beside(), strict=True
            )
        )
        return Profile(
            lanes=("model/0",),
            kinds={"model/0": items},
            regions={"model/0": regions} if regions else {},
            marks=marks,
            head_ms=device_ms(0, first),
            head_host_ms=host_ms(0, first),
            tail_ms=device_ms(backward_end, len(tasks)),
            tail_host_ms=host_ms(backward_end, len(tasks)),
            device="meta",
            **more,
        )

    def stored(
        self, graph: Graph, tasks: Sequence[Task], mode_ms: float
    ) -> tuple[StoredResult, ...]:
        """Return what selective checkpointing stores in each call.

        Args:
            mode_ms: what its dispatch mode takes the host for an operator.
        """
        found = []
        for call in self._calls:
            inside = range(call.start, call.end)
            kept = kept_operators((at, graph.nodes[at].name) for at in inside)
            outputs = (each for at in kept for each in graph.nodes[at].outputs)
            made = {graph.tensors[each].storage for each in outputs}
            num_bytes = sum(graph.storages[each].num_bytes for each in made)
            ms = sum(_device_ms(tasks[at : at + 1]) for at in kept)
            found.append(StoredResult(ms, num_bytes, mode_ms * len(inside)))
        return tuple(found)

    def _beside(self) -> list[int]:
        """Return the memory of gradients and temporaries when each call runs again."""
        before: dict[int, int] = {}
        for mark in self._marks:
            region = self.items[mark.item].item.region
            if mark.phase is Phase.BACKWARD and region >= 0:
                before.setdefault(region, mark.begin_bytes)
        return [before.get(number, 0) for number in range(len(self._calls))]

    def _parts(
        self, number: int, device_ms: Callable[[int, int], float]
    ) -> tuple[AttentionPart, ...]:
        """Return the attentions inside a call."""
        made: dict[int, list[int]] = {}
        for at, kept in enumerate(self.items):
            if kept.item.region == number and kept.source in self._attentions:
                made.setdefault(kept.source, []).append(at)
        return tuple(
            AttentionPart(items=tuple(own), ms=device_ms(source, source + 1))
            for source, own in made.items()
        )


def _device_ms(tasks: Sequence[Task]) -> float:
    lengths = [task.device_us for task in tasks if task.device_us > 0.0]
    return (sum(lengths) + KERNEL_GAP_US * len(lengths)) / 1e3


def _host_ms(tasks: Sequence[Task]) -> float:
    return sum(task.host_us + task.host_after_us for task in tasks) / 1e3


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
