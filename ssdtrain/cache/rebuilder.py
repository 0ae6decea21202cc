"""Recipes in the cache: saved tensors that are made again instead of stored.

All handles of a base tensor share one `Rebuilt`: the first use in backward runs the
recipe, and the copy is dropped when each handle has had its use. An input of a recipe
holds one more handle of its record, and running the recipe uses that handle; so the
input's place in the order of the lane, and in the prefetch, is where it is needed.

[Note: searched once]
A plan changes what is rebuilt, and not by what. So the first step under a plan, and
what has no row or another size than its row's, tries what was found for tensors that
look the same ([Note: similar tensors] in rebuild/compiled.py), and searches only where
an answer is another one. Observed steps search: the next plan's choice is made of them.
(tests/ssdtrain/cache/test_rebuilt_rows.py)

[Note: places]
A recipe is admitted by class, on one tensor. A program may write to another one of the
class and leave no trace in the graph or a version: a hook that sets `.data`, a kernel
that is called on a tensor, NumPy. So each item of a kind of lane is compared once, of
whatever size, and is stored from then on where it is other than its recipe makes it.
(tests/ssdtrain/rebuild/test_between.py)
"""

import logging
import weakref
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ssdtrain.cache.identity import Key, Probe, View, is_plain, view_of
from ssdtrain.cache.keeper import CacheKeeper, Note
from ssdtrain.cache.moved import MovedHandle, MovedNote
from ssdtrain.cache.recipes import Recipes
from ssdtrain.cache.record import (
    Handle,
    Kept,
    Lane,
    ParameterView,
    Rebuilt,
    RebuiltView,
    Record,
    RecordView,
)
from ssdtrain.cache.state import Known
from ssdtrain.cache.weights import Weights
from ssdtrain.counters import Fallback
from ssdtrain.errors import ConfigError
from ssdtrain.numerics import numerics, restored
from ssdtrain.rebuild.admission import Classes, is_dense, same_bytes
from ssdtrain.rebuild.between import is_unwritten
from ssdtrain.rebuild.compiled import Compiled, RecipeMemory
from ssdtrain.rebuild.expression import Expression, Layout, TensorInput, evaluate
from ssdtrain.rebuild.finder import Finder, Found
from ssdtrain.rebuild.frame import epsilon_now
from ssdtrain.rebuild.graph import AutogradGraph, Store, notes_of
from ssdtrain.rebuild.modes import ENTRIES

if TYPE_CHECKING:
    from ssdtrain.cache.cache import TensorCache

logger = logging.getLogger(__name__)


class Rebuilder(Recipes):
    """Recipes of one cache, its `recipes`."""

    def __init__(
        self,
        cache: "TensorCache",
        finder: Finder,
        weights: Weights,
    ) -> None:
        self._cache = cache
        self.finder = finder
        self._device = cache.offloader.device.torch_device
        self._classes = Classes()
        self._places: dict[Hashable, bool] = {}
        """Whether a recipe was equal at a place of the step: [Note: places]."""
        self._alive = Known()
        self._weights = weights
        self.keeper = CacheKeeper(cache, weights)
        self._failed: set[str] = set()
        self._memory = RecipeMemory()
        self._stop_listening = ENTRIES.listen()

    def forward_begins(self) -> None:
        """As the base class."""
        self._weights.forward_begins()

    # -- pack ---------------------------------------------------------------------

    def offer(self, tensor: Tensor, key: Key, view: View) -> Handle | None:
        """As the base class."""
        rebuilt = self._open(tensor, key)
        return None if rebuilt is None else self._handle_of(rebuilt, tensor, view)

    def knows(self, key: Key) -> bool:
        """As the base class."""
        return self._alive.get(key) is not None

    def again(self, tensor: Tensor, key: Key, view: View) -> Handle | None:
        """As the base class."""
        rebuilt = self._alive.get(key)
        if rebuilt is None or self.keeper.is_of_another_region(rebuilt):
            return None
        base = tensor if tensor._base is None else tensor._base
        place = rebuilt.item, rebuilt.num_saves
        if not self._is_unwritten(tensor, base) or not self._equals(
            rebuilt.expression, rebuilt.holders, place, base
        ):
            return None
        return self._handle_of(rebuilt, tensor, view)

    def _handle_of(self, rebuilt: Rebuilt, tensor: Tensor, view: View) -> Handle:
        rebuilt.num_handles += 1
        rebuilt.num_saves += 1
        probe = Probe.of(tensor, self._cache.nothing)
        return Handle(RebuiltView(rebuilt, view, probe))

    def _open(self, tensor: Tensor, key: Key) -> Rebuilt | None:
        base = tensor if tensor._base is None else tensor._base
        lane = self._cache.lanes.current
        whole = key.start_byte == 0 and key.end_byte == base.nbytes
        plain = base is tensor or is_plain(base)  # `tensor` was looked at
        if not whole or not plain or not is_dense(base):
            return None
        if base.is_conj() or base.is_neg() or not self._is_unwritten(tensor, base):
            return None
        asked = self._asked_again(base, lane)
        if asked is not None:
            return self._open_again(*asked, base, key)
        self.keeper.met_unsaved = False
        found = self._find(base)
        if found is None:
            if self.keeper.met_unsaved:
                self._cache.offloader.fall_back(Fallback.RECIPE_UNSAVED)
            return None
        expression = self._chosen(found.expression, base)
        if expression is None:
            return None
        lane.num_recipes += 1
        rebuilt = self._add(expression, expression.inputs, base, Layout.of(base), key)
        if self._is_remembered(lane) and found.search is not None:
            rebuilt.compiled = Compiled.of(expression, found.search, base)
            if rebuilt.compiled is not None:
                self._memory.add(base, rebuilt.compiled)
        return rebuilt

    def _is_remembered(self, lane: Lane) -> bool:
        """Whether what is found is asked for again, by rows or of what looks the
        same."""
        is_placed = lane.binding is not None or self._cache.cursor.observer.listens
        return is_placed or self._follows_plan(lane)

    def _follows_plan(self, lane: Lane) -> bool:
        return self._cache.cursor.of(lane).orders is not None

    def _asked_again(
        self, base: Tensor, lane: Lane
    ) -> tuple[Compiled, AutogradGraph] | None:
        """A recipe that was found for what looks the same, if it is right of this
        tensor:
        [Note: searched once]."""
        cache = self._cache
        if base.grad_fn is None or cache.captures.is_forward:
            return None
        if cache.regions.current is not None or cache.cursor.observer.listens:
            return None
        if not self._follows_plan(lane):
            return None
        for compiled in self._memory.of(base):
            asked = self.finder.again(compiled, base, self.keeper)
            # The longest chain is the search's to know.
            if asked and _depth(asked.inputs) <= _depth(compiled.expression.inputs):
                return compiled, asked
        return None

    def _open_again(
        self, compiled: Compiled, asked: AutogradGraph, base: Tensor, key: Key
    ) -> Rebuilt | None:
        self._cache.lanes.current.num_recipes += 1
        operands = compiled.operands(asked)
        expression, layout = compiled.expression, compiled.layout
        if not self._is_equal_here(expression, operands, base):
            return None
        rebuilt = self._add(expression, operands, base, layout, key)
        rebuilt.compiled = compiled
        return rebuilt

    def ask(
        self, compiled: Compiled, tensor: Tensor, key: Key | None
    ) -> AutogradGraph | None:
        """As the base class."""
        base = tensor if tensor._base is None else tensor._base
        if base is not tensor and not is_plain(base):  # `tensor` was looked at
            return None
        if key is not None and (key.start_byte or key.end_byte != base.nbytes):
            return None
        if base is not tensor and not self._is_unwritten(tensor, base):
            return None
        return self.finder.again(compiled, base, self.keeper)

    def take(
        self,
        compiled: Compiled,
        asked: AutogradGraph,
        tensor: Tensor,
        key: Key | None,
        view: View,
        store: Store | None = None,
    ) -> Handle:
        """As the base class."""
        self._cache.lanes.current.num_recipes += 1
        operands = compiled.operands(asked, store)
        base, layout = asked.tensor, compiled.layout
        rebuilt = self._add(compiled.expression, operands, base, layout, key)
        return self._handle_of(rebuilt, tensor, view)

    def _add(
        self,
        expression: Expression,
        operands: Sequence[TensorInput],
        base: Tensor,
        layout: Layout,
        key: Key | None,
    ) -> Rebuilt:
        """A recipe is used instead of bytes."""
        lane = self._cache.lanes.current
        holders, retired = (
            tuple([each.holder for each in operands]),
            self._cache.retired,
        )
        rebuilt = Rebuilt(expression, holders, layout, base.nbytes, lane, retired)
        rebuilt.region = self._cache.regions.current
        if self._device.type == "cpu" or expression.is_expensive:
            rebuilt.numerics = numerics(self._device)
        if key is not None:
            self._alive.add(key, rebuilt)
        stored_bytes = 0
        for each in operands:
            holder = each.holder
            if type(holder) is MovedHandle:  # as most are
                holder.moved.num_handles += 1
            else:
                _count_handle(holder)
            stored_bytes += each.stored_bytes
        spared_bytes = rebuilt.num_bytes - stored_bytes
        self._cache.ledger.counters.rebuilt(
            expression.recipe, spared_bytes, num_records=1
        )
        return rebuilt

    def _is_unwritten(self, tensor: Tensor, base: Tensor) -> bool:
        """See [Note: the node between] in rebuild/between.py."""
        if is_unwritten(tensor, base):
            return True
        self.keeper.refuse()
        return False

    def _is_equal_here(
        self, expression: Expression, operands: Sequence[TensorInput], base: Tensor
    ) -> bool:
        """Whether the item that is packed now is what the recipe makes."""
        holders = [each.holder for each in operands]
        return self._equals(expression, holders, self._place, base)

    @property
    def _place(self) -> tuple[int, int]:
        """Of the first save of the item that is packed now."""
        return self._cache.cursor.serving, 0

    def _key_of(self, expression: Expression, place: tuple[int, int]) -> Hashable:
        return self._cache.lanes.current.kind, place, expression.recipe

    def _equals(
        self,
        expression: Expression,
        holders: Sequence[Any],
        place: tuple[int, int],
        base: Tensor,
    ) -> bool:
        """Whether it was equal at a place of the step: see [Note: places].

        place: number of the item, and of its saves before this one.
        """
        has_places = bool(self._cache.lanes.current.kind)
        if not has_places or expression.is_compared_always:
            return True
        key = self._key_of(expression, place)
        equal = self._compared_once(self._places, key, expression, base, holders)
        if equal is None and self._cache.captures.is_forward:
            return False
        if not equal:
            self.keeper.refuse()
        return bool(equal)

    def _compared_once(
        self,
        known: dict[Hashable, bool],
        key: Hashable,
        expression: Expression,
        base: Tensor,
        holders: Iterable[Any],
    ) -> bool | None:
        """What is known of a key; None: a graph is captured, or there is no memory to
        compare."""
        equal = known.get(key)
        if equal is None and not self._cache.captures.is_forward:
            equal = self._check(expression, base, holders)
            if equal is not None:
                known[key] = equal
        return equal

    def _find(self, base: Tensor) -> Found | None:
        try:
            return self.finder.find(base, self.keeper)
        except Exception as error:
            self._report("recipe", base, error)
            self.keeper.refuse()
            return None

    def _chosen(self, plain: Expression, base: Tensor) -> Expression | None:
        """The recipe, if it is admitted here."""
        if not self._admits(plain, base):
            self.keeper.refuse()
            return None
        return plain if self._is_equal_here(plain, plain.inputs, base) else None

    def _admits(self, expression: Expression, base: Tensor) -> bool:
        """Whether its class gave the same bytes: [Note: admission]."""
        holders = [each.holder for each in expression.inputs]
        captured = self._cache.captures.is_forward
        if captured and expression.is_compared_always:
            return False  # nothing can be compared now
        if expression.is_compared_always:
            return bool(self._check(expression, base, holders))
        key = expression.signature, Layout.of(base).shape_class, base.device
        is_new = key not in self._classes
        equal = self._compared_once(self._classes, key, expression, base, holders)
        if is_new and equal is not None:
            self._places[self._key_of(expression, self._place)] = equal
        return bool(equal)

    def _check(
        self,
        expression: Expression,
        base: Tensor,
        holders: Iterable[Any],
    ) -> bool | None:
        """Whether it makes the same bytes of what these hold; None: there is no memory
        to see."""
        try:
            return same_bytes(self._preview(expression, holders), base.detach())
        except (torch.OutOfMemoryError, ConfigError):  # the second: what says it
            return None
        except Exception as error:
            self._report("check", base, error)
            return False

    def _preview(self, expression: Expression, holders: Iterable[Handle]) -> Tensor:
        return evaluate(expression, [self.peek(holder) for holder in holders])

    def peek(self, handle: Handle) -> Tensor:
        """The tensor as it is now; no use is counted and no record changes."""
        if type(handle) is MovedHandle:
            return handle.peek()
        source = handle.source
        if isinstance(source, Kept | ParameterView):
            return source.rebuild()
        if isinstance(source, RebuiltView):
            rebuilt = source.rebuilt
            data = self._preview(rebuilt.expression, rebuilt.holders)
            return source.view.rebuild(data)
        return source.view.rebuild(self._peek_at_record(source.record))

    def _peek_at_record(self, record: Record) -> Tensor:
        device = self._cache.offloader.device
        if record.data is not None:
            if record.load is not None:
                record.load.wait(device)
            return record.data
        if record.transfer is None:
            raise RuntimeError(f"{record.name}: neither here nor away")
        # It has left already. A copy is brought back, once for each class.
        data = torch.empty(
            record.num_bytes, dtype=torch.uint8, device=device.torch_device
        )
        self._cache.offloader.load(record.transfer, data).wait(device)
        return data

    def _report(self, what: str, base: Tensor, error: Exception) -> None:
        """Warn once for each kind of producer; the tensor is then stored as bytes."""
        name = "dropout" if base.grad_fn is None else base.grad_fn.name()
        if name not in self._failed:
            self._failed.add(name)
            # Its text: the error itself would keep the frames' tensors alive.
            logger.warning("the %s of %s failed: %s", what, name, repr(error))

    def note(self, tensor: Tensor, handle: Handle, *, by_norm: bool = True) -> None:
        """As the base class: on the node of the tensor's base."""
        if by_norm:
            handle.epsilon = epsilon_now()
        base = tensor if tensor._base is None else tensor._base
        node = base.grad_fn
        if node is None or base._version:
            return
        if base is not tensor and not is_unwritten(tensor, base):
            return  # it is not what the node made
        if type(handle) is MovedHandle:
            if base is tensor:
                outputs = notes_of(node).outputs
                outputs[base.output_nr] = MovedNote(weakref.ref(handle))
            return
        source = handle.source
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

    # -- unpack -------------------------------------------------------------------

    def use(self, source: RebuiltView) -> Tensor:
        """As the base class."""
        rebuilt, view, probe = source
        if probe.counter._version != probe.version:
            probe.check(rebuilt)
        data = rebuilt.data
        if data is None:
            data = self._rebuild(rebuilt)
            rebuilt.data = data
            rebuilt.holding.live_bytes = rebuilt.num_bytes
            self._cache.ledger.live(rebuilt.num_bytes)
        tensor = data if view.is_whole(data) else view.rebuild(data)
        rebuilt.num_uses += 1
        if rebuilt.num_uses >= rebuilt.num_handles:
            rebuilt.num_uses = 0
            rebuilt.data = None
            rebuilt.holding.live_bytes = 0
            self._cache.ledger.hand_over(rebuilt.num_bytes)
        return tensor

    def _rebuild(self, rebuilt: Rebuilt) -> Tensor:
        expression, ledger = rebuilt.expression, self._cache.ledger
        observer, clock = self._cache.cursor.observer_of(rebuilt.lane), ledger.clock
        handed_bytes = ledger.handed_bytes
        try:
            read = self._cache.read
            tensors = [
                holder.get() if type(holder) is MovedHandle else read(holder)
                for holder in rebuilt.holders
            ]
            if observer.listens:
                observer.rebuilds()
            begun = clock.begin()
            wanted = rebuilt.numerics
            if wanted is None or wanted == numerics(self._device):
                tensor = evaluate(expression, tensors)
            else:
                with restored(wanted, self._device):
                    tensor = evaluate(expression, tensors)
            if begun is not None:
                size = rebuilt.num_bytes
                clock.end(begun, expression.recipe, rebuilt.place, size)
            if observer.listens:
                cursor = self._cache.cursor.of(rebuilt.lane)
                observer.rebuilt(cursor.number, rebuilt.item)
        finally:
            ledger.was_read(handed_bytes)
        if not rebuilt.layout.is_of(tensor) or tensor.storage_offset():
            raise RuntimeError(
                f"{rebuilt.name}: its recipe made {Layout.of(tensor)}, expected "
                f"{rebuilt.layout}; a recipe must depend on its inputs and constants "
                "alone. Set recompute='off', or mend the recipe."
            )
        return tensor

    def close(self) -> None:
        """As the base class."""
        self._stop_listening()


def _depth(operands: Iterable[TensorInput]) -> int:
    return max((each.depth for each in operands), default=0)


def _count_handle(handle: Handle) -> None:
    source = handle.source
    if isinstance(source, RecordView):
        source.record.num_handles += 1
    elif isinstance(source, RebuiltView):
        source.rebuilt.num_handles += 1
