"""Recipes in the cache: saved tensors that are made again instead of stored.

All handles of a base tensor share one `Rebuilt`: the first use in backward runs the
recipe, and the copy is dropped when each handle has had its use. An input counts as
one handle of its record more, and running the recipe as that handle's use; so the
input's place in the order of the lane, and in the prefetch, is where it is needed.
"""

import logging
import weakref
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ssdtrain.cache.captured import Captures
from ssdtrain.cache.course import Course
from ssdtrain.cache.digest import word_bytes
from ssdtrain.cache.handles import (
    KeptHandle,
    ParameterHandle,
    ParameterViewHandle,
)
from ssdtrain.cache.identity import Key, Probe, View, is_plain, view_of
from ssdtrain.cache.lanes import Lanes
from ssdtrain.cache.ledger import Ledger
from ssdtrain.cache.moved import MovedHandle
from ssdtrain.cache.record import (
    Handle,
    Kept,
    Known,
    ParameterView,
    Rebuilt,
    RebuiltView,
    Record,
    RecordView,
    Retired,
    Wrapped,
)
from ssdtrain.cache.regions import FromRegion, Regions
from ssdtrain.cache.verify import LateChecksum
from ssdtrain.cache.weights import Weights
from ssdtrain.counters import Count, Fallback
from ssdtrain.numerics import numerics, restored
from ssdtrain.remat.admission import Admission, Verdict, is_dense, raw, same_bytes
from ssdtrain.remat.budget import Budget
from ssdtrain.remat.compiled import Compiled
from ssdtrain.remat.expression import Expression, Held, Layout, evaluate
from ssdtrain.remat.finder import Finder, Found
from ssdtrain.remat.modes import ENTRIES
from ssdtrain.remat.questions import Asking, notes_of
from ssdtrain.remat.scene import epsilon_now
from ssdtrain.transfer.offloader import Offloader

logger = logging.getLogger(__name__)


class Cache(Protocol):
    """What recipes need of the cache they belong to."""

    course: Course
    ledger: Ledger
    lanes: Lanes
    offloader: Offloader
    retired: Retired
    regions: Regions
    captures: Captures

    def pack(self, tensor: Tensor) -> Handle:
        """Take over a tensor."""

    def unpack(self, handle: Handle) -> Tensor:
        """Bring a tensor back."""

    def probe_of(self, tensor: Tensor) -> Probe:
        """A probe of a plain tensor on the device."""


HANDLES = (Handle, KeptHandle, ParameterHandle, ParameterViewHandle)


class Note(NamedTuple):
    """Put on a node: an output of it was saved, and is this view of that."""

    owner: "weakref.ref[Record | Rebuilt]"
    view: View
    probe: Probe

    def handle(self) -> Handle | None:
        """A new handle, while the owner lives."""
        owner = self.owner()
        if owner is None:
            return None
        if isinstance(owner, Record):
            return Handle(RecordView(owner, self.view, self.probe))
        return Handle(RebuiltView(owner, self.view, self.probe))


class Rebuilder:
    """Recipes of one cache."""

    def __init__(
        self, cache: Cache, finder: Finder, weights: Weights, budget: Budget
    ) -> None:
        self._cache = cache
        self.finder = finder
        self._budget = budget
        cache.ledger.clock.watch(budget)
        self._device = cache.offloader.device.torch_device
        self._guard = LateChecksum(self._device)
        self._admission = Admission()
        self._alive = Known()
        self._met_unsaved = False
        """Whether the running search met what it may not pass."""
        self._weights = weights
        self._failed: set[str] = set()
        self._stop_listening = ENTRIES.listen()

    def forward_begins(self) -> None:
        """A forward of the model is about to run."""
        self._weights.forward_begins()

    # -- pack ---------------------------------------------------------------------

    def offer(self, tensor: Tensor, key: Key, view: View) -> Handle | None:
        """A handle that rebuilds the tensor, or None: store it."""
        rebuilt = self._open(tensor, key)
        return None if rebuilt is None else self._handle_of(rebuilt, tensor, view)

    def again(self, tensor: Tensor, key: Key, view: View) -> Handle | None:
        """Another handle of a tensor that is rebuilt already, or None."""
        rebuilt = self._alive.get(key)
        return None if rebuilt is None else self._handle_of(rebuilt, tensor, view)

    def _handle_of(self, rebuilt: Rebuilt, tensor: Tensor, view: View) -> Handle:
        rebuilt.num_handles += 1
        return Handle(RebuiltView(rebuilt, view, self._cache.probe_of(tensor)))

    def _open(self, tensor: Tensor, key: Key) -> Rebuilt | None:
        base = tensor if tensor._base is None else tensor._base
        lane = self._cache.lanes.current
        whole = key.start_byte == 0 and key.end_byte == base.nbytes
        plain = base is tensor or is_plain(base)  # `tensor` was looked at
        if not whole or not plain or not is_dense(base):
            return None
        if base.is_conj() or base.is_neg():
            return None
        self._met_unsaved = False
        found = self._find(base)
        if found is None:
            if self._met_unsaved:
                self._cache.offloader.fall_back(Fallback.RECIPE_UNSAVED)
            return None
        expression = self._chosen(found.expression, base)
        if expression is None:
            return None
        lane.num_recipes += 1
        if not self._budget.allows((lane.name, lane.num_recipes)):
            self._cache.offloader.fall_back(Fallback.RECIPE_NOT_WORTH)
            return None
        rebuilt = self._add(expression, expression.held, base, key)
        if lane.binding is not None and found.trail is not None:
            rebuilt.compiled = Compiled.of(expression, found.trail, base)
        return rebuilt

    def ask(self, compiled: Compiled, tensor: Tensor, key: Key) -> Asking | None:
        """Whether a tensor may be made by the recipe that its row knows; None: no."""
        base = tensor if tensor._base is None else tensor._base
        if not is_plain(base) or key.start_byte or key.end_byte != base.nbytes:
            return None
        return self.finder.again(compiled, base, self)

    def take(
        self, compiled: Compiled, asked: Asking, tensor: Tensor, key: Key, view: View
    ) -> Handle:
        """A handle of a tensor whose recipe was asked for."""
        self._cache.lanes.current.num_recipes += 1
        operands = compiled.operands(asked)
        rebuilt = self._add(compiled.expression, operands, asked.tensor, key)
        return self._handle_of(rebuilt, tensor, view)

    def _add(
        self,
        expression: Expression,
        operands: Sequence[Held],
        base: Tensor,
        key: Key,
    ) -> Rebuilt:
        """A recipe is used instead of bytes."""
        lane = self._cache.lanes.current
        holders = tuple(held.holder for held in operands)
        layout, retired = Layout.of(base), self._cache.retired
        rebuilt = Rebuilt(expression, holders, layout, lane, retired)
        rebuilt.region = self._cache.regions.current
        if self._device.type == "cpu" or expression.is_dear:
            rebuilt.numerics = numerics(self._device)
        if expression.is_guarded:
            rebuilt.digest = self._guard.evidence(base.detach(), word_bytes(base))
        self._alive.add(key, rebuilt)
        stored_bytes = 0
        for held in operands:
            _count_handle(held.holder)
            stored_bytes += held.stored_bytes
        spared_bytes = rebuilt.num_bytes - stored_bytes
        counters = self._cache.ledger.counters
        counters.add_all(
            {
                Count.RECORDS: 1,
                Count.SAVED: spared_bytes,
                Count.RECOMPUTED: spared_bytes,
            }
        )
        counters.rebuilt(expression.recipe, spared_bytes)
        return rebuilt

    def _find(self, base: Tensor) -> Found | None:
        try:
            return self.finder.find(base, self)
        except Exception as error:
            self._report("recipe", base, error)
            self.refuse()
            return None

    def _chosen(self, plain: Expression, base: Tensor) -> Expression | None:
        """The first admitted way to make this tensor. See [Note: faster kernels]."""
        for expression in plain.faster:
            if self._verdict(expression, base) is Verdict.ADMITTED:
                return expression
        if self._verdict(plain, base) is not Verdict.ADMITTED:
            self.refuse()
            return None
        if plain.faster:
            self._cache.offloader.fall_back(Fallback.RECIPE_SLOWER)
        return plain

    def _verdict(self, expression: Expression, base: Tensor) -> Verdict:
        if self._cache.captures.is_forward:
            # Nothing can be compared now: what earlier steps admitted is admitted, and
            # what would be compared at every rebuild is stored.
            if expression.is_guarded:
                return Verdict.UNKNOWN
            return self._known(expression, base)
        if expression.is_compared_always:
            equal = self._check(expression, base)
            return Verdict.ADMITTED if equal else Verdict.REFUSED
        verdict = self._known(expression, base)
        if verdict is Verdict.UNKNOWN:
            equal = self._check(expression, base)
            verdict = self._admission.decide(_signature(expression, base), equal)
        return verdict

    def _known(self, expression: Expression, base: Tensor) -> Verdict:
        if expression.is_compared_always:
            return Verdict.UNKNOWN
        return self._admission.verdict(_signature(expression, base))

    def _check(self, expression: Expression, base: Tensor) -> bool:
        try:
            holders = [held.holder for held in expression.held]
            return same_bytes(self._preview(expression, holders), base.detach())
        except Exception as error:
            self._report("check", base, error)
            return False

    def _preview(self, expression: Expression, holders: Iterable[Handle]) -> Tensor:
        return evaluate(expression, [self.peek(holder) for holder in holders])

    def peek(self, handle: Handle) -> Tensor:
        """The tensor as it is now; no use is counted and no record changes."""
        source = handle.source
        if isinstance(source, Kept | ParameterView):
            return source.rebuild()
        if isinstance(source, RebuiltView):
            rebuilt = source.rebuilt
            data = raw(self._preview(rebuilt.expression, rebuilt.holders))
            return source.view.rebuild(data)
        return source.view.rebuild(self._peek_at_record(source.record))

    def _peek_at_record(self, record: Record) -> Tensor:
        device = self._cache.offloader.device
        if record.data is not None:
            if record.load is not None:
                record.load.wait(device)
            return record.data
        if record.parcel is None:
            raise RuntimeError(f"{record.name}: neither here nor away")
        # It has left already. A copy is brought back, once for each class.
        data = torch.empty(
            record.num_bytes, dtype=torch.uint8, device=device.torch_device
        )
        self._cache.offloader.load(record.parcel, data).wait(device)
        return data

    def _report(self, what: str, base: Tensor, error: Exception) -> None:
        """Warn once for each kind of producer; the tensor is then stored as bytes."""
        name = "dropout" if base.grad_fn is None else base.grad_fn.name()
        if name not in self._failed:
            self._failed.add(name)
            # Its text: the error itself would keep the frames' tensors alive.
            logger.warning("the %s of %s failed: %s", what, name, repr(error))

    def note(self, tensor: Tensor, handle: Handle) -> None:
        """Remember on the node of the base that this output was saved."""
        handle.epsilon = epsilon_now()
        base = tensor if tensor._base is None else tensor._base
        source, node = handle.source, base.grad_fn
        if node is None or base._version:
            return
        owner: Record | Rebuilt
        if isinstance(source, RecordView):
            owner, start = source.record, source.record.key.start_byte
        elif isinstance(source, RebuiltView):
            owner, start = source.rebuilt, 0
        else:
            return
        view = source.view
        if base is not tensor:
            if not is_plain(base):
                return
            first = int(base.storage_offset()) * base.itemsize
            view = view_of(base, first - start)
        outputs = notes_of(node).outputs
        outputs[base.output_nr] = Note(weakref.ref(owner), view, source.probe)

    # -- the keeper of remat ------------------------------------------------------

    def held(self, packed: Any, node: Any) -> Held | None:
        """The tensor behind a handle or a note of this node, unless it was changed."""
        handle = packed.handle() if isinstance(packed, Note) else packed
        if not isinstance(handle, HANDLES) or isinstance(handle, MovedHandle):
            return None  # nobody's, or on its way out without a record
        source = handle.source
        if isinstance(source, Kept):
            tensor = source.tensor
            if tensor._version != source.version or not is_plain(tensor):
                return None
            return Held(holder=handle, layout=Layout.of(tensor), owner=tensor)
        if isinstance(source, ParameterView):
            return self._saved_parameter(source, node)
        if not isinstance(handle, Handle) or isinstance(source, Wrapped | FromRegion):
            return None  # no such handle has a record
        owner = source.record if isinstance(source, RecordView) else source.rebuilt
        if owner.region is not None and owner.region is not self._cache.regions.current:
            return None  # to read it, its region would run again, too early
        ours = owner.retired is self._cache.retired
        view, probe = source.view, source.probe
        if probe.counter._version != probe.version:
            self.refuse()
            return None
        if not ours or view.is_conj or view.is_neg:
            return None
        depth = owner.expression.depth if isinstance(owner, Rebuilt) else 0
        layout = Layout(view.dtype, tuple(view.shape), view.stride)
        return Held(
            holder=handle,
            layout=layout,
            depth=depth,
            owner=owner,
            epsilon=handle.epsilon,
        )

    def is_altered(self) -> bool:
        """Whether a dispatch mode stands, which the hooks count, or was entered in this
        step."""
        return ENTRIES.num != self._cache.ledger.modes_before

    def refuse(self) -> None:
        """Count a recipe that had to be refused."""
        self._cache.offloader.fall_back(Fallback.RECIPE_REFUSED)

    def refuse_unsaved(self) -> None:
        """A way refused by [Note: unsaved tensors]: counted if there is no other."""
        self._met_unsaved = True

    def parameter(
        self, parameter: nn.Parameter, node: Any, edge: int | None = None
    ) -> Held | None:
        """A parameter as the operator of this node read it."""
        if not is_plain(parameter):
            return None
        state, seen = self._weights.state(parameter), None
        if edge is not None:
            seen = notes_of(node).parameters.get(edge)
        if seen is None:
            is_same = self._weights.was_read_as_is(
                parameter, node, was_saved=edge is None
            )
        else:
            is_same = seen == state
        if not is_same:
            self.refuse()
            return None
        if edge is not None:
            notes_of(node).parameters[edge] = state
        handle = self._weights.operand(parameter)
        if handle is None:
            return None
        layout = Layout.of(parameter)
        return Held(holder=handle, layout=layout, parameter=parameter)

    def _saved_parameter(self, view: ParameterView, node: Any) -> Held | None:
        """A parameter, or a view of one: the transposed weight of a linear layer."""
        parameter = view.parameter
        if parameter._version != view.version or not is_plain(parameter):
            return None
        if view.shape is None:
            return self.parameter(parameter, node)
        if not torch.ops.aten.is_non_overlapping_and_dense(parameter):
            return None  # a copy of it would have other strides
        if not self._weights.was_read_as_is(parameter, node, was_saved=True):
            self.refuse()
            return None
        handle = self._weights.operand(parameter, view)
        if handle is None:
            return None
        layout = Layout(parameter.dtype, tuple(view.shape), view.stride)
        return Held(holder=handle, layout=layout, parameter=parameter)

    def narrowed(self, tensor: Tensor) -> Held:
        """Store a new tensor; it goes where its placement says."""
        handle = self._cache.pack(tensor)
        return Held(holder=handle, layout=Layout.of(tensor), stored_bytes=tensor.nbytes)

    # -- unpack -------------------------------------------------------------------

    def use(self, source: RebuiltView) -> Tensor:
        """The tensor, rebuilt unless another handle's use has just done it.

        Raises:
            InPlaceError: it, or an input of its recipe, was changed after it was saved.
        """
        rebuilt = source.rebuilt
        source.probe.check(rebuilt)
        if rebuilt.data is None:
            rebuilt.data = raw(self._rebuild(rebuilt))
            rebuilt.holding.live_bytes = rebuilt.num_bytes
            self._cache.ledger.live(rebuilt.num_bytes)
        tensor = source.view.rebuild(rebuilt.data)
        rebuilt.num_uses += 1
        if rebuilt.num_uses >= rebuilt.num_handles:
            rebuilt.num_uses = 0
            rebuilt.data = None
            rebuilt.holding.live_bytes = 0
            self._cache.ledger.hand_over(rebuilt.num_bytes)
        return tensor

    def _rebuild(self, rebuilt: Rebuilt) -> Tensor:
        expression, ledger = rebuilt.expression, self._cache.ledger
        size = rebuilt.num_bytes
        # A mask has no gradient; everything else was made by a differentiable operator.
        gradient = size if rebuilt.layout.dtype.is_floating_point else 0
        with ledger.reading():
            tensors = [self._cache.unpack(holder) for holder in rebuilt.holders]
            place = rebuilt.place
            course = self._cache.course
            course.observer.runs_again()
            under = restored(rebuilt.numerics, self._device)
            measured = ledger.clock.measure(expression.recipe, place, size, gradient)
            with measured, under:
                tensor = evaluate(expression, tensors)
            if course.observer.listens:
                course.observer.rebuilt(course.of(rebuilt.lane).number, rebuilt.item)
        if Layout.of(tensor) != rebuilt.layout or tensor.storage_offset():
            raise RuntimeError(
                f"{rebuilt.name}: its recipe made {Layout.of(tensor)}, expected "
                f"{rebuilt.layout}; a recipe must depend on its inputs and constants "
                "alone. Set recompute='off', or mend the recipe."
            )
        if rebuilt.digest is not None:
            text = (
                f"{rebuilt.name} is not what was saved: the model writes to a tensor "
                "on the way to it, under no_grad, in some steps and not in others; set "
                "recompute='off'"
            )
            word = word_bytes(tensor)
            self._guard.compare_digests(tensor, word, rebuilt.digest, text)
        return tensor

    def close(self) -> None:
        """Look at what is still to be compared; waits for the device.

        Raises:
            ActivationChangedError: a guarded recipe made other bytes.
        """
        self._stop_listening()
        self._guard.settle()


def _signature(expression: Expression, base: Tensor) -> Hashable:
    return expression.signature, Layout.of(base).shape_class, base.device


def _count_handle(handle: Handle) -> None:
    source = handle.source
    if isinstance(source, RecordView):
        source.record.num_handles += 1
    elif isinstance(source, RebuiltView):
        source.rebuilt.num_handles += 1
