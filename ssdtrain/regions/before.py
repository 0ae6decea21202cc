"""Puts modules back into the state of a forward, for the time that it runs again.

[Note: state between forward and backward]
A program may change what a forward has read before backward comes: an attribute (a
rate, a scale, the adapter that is active), a weight or a whole submodule that another
object replaces (`functional_call`, `load_state_dict(assign=True)`), `requires_grad`.
Plain autograd does not notice, because it needs none of it again. So a re-run gets back
what its forward had: every attribute, parameter, buffer and submodule by identity, what
the modules' code reads of globals, enclosing functions and classes, and what lies
inside of them ([Note: further inside] in regions/deep.py). So a context that the
model's forward enters and leaves is there again. What cannot be put back is an error:
tensors that were written or freed, and hooks that were added.
(tests/ssdtrain/regions/test_between.py)
"""

from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ssdtrain.errors import RegionError
from ssdtrain.gathered import gathered_inside, is_gathered, is_other_face
from ssdtrain.regions.deep import PLAIN, STANDARD, Deep
from ssdtrain.regions.inside import Inside, put_inside, seen, tell_of
from ssdtrain.regions.inventory import (
    HOOKS_OF_ALL,
    Fingerprint,
    Inventory,
    counts_changes,
)
from ssdtrain.regions.reads import Reads
from ssdtrain.regions.restore import Undo, put_back, put_kind
from ssdtrain.regions.updated import NONE_UPDATED, Updated, storages
from ssdtrain.regions.weights import has_place


class Parts(NamedTuple):
    """One module as a forward found it."""

    module: nn.Module
    kind: type
    own: dict[str, Any]
    buffers: dict[str, Any]
    parameters: dict[str, Any]
    modules: dict[str, Any]
    written: dict[str, int]
    """Versions of the buffers, but for those that a re-run gets copies of."""
    insides: dict[str, Inside]
    """Contents of attributes, by name."""
    requires: tuple[bool, ...]
    """`requires_grad` of the parameters."""
    marks: dict[str, dict[str, Any]]
    """Attributes of parameters and buffers, by their names: of those that have some
    for which the code may ask."""

    @classmethod
    def of(
        cls, module: nn.Module, names: list[str], asked: set[str], updated: Updated
    ) -> "Parts":
        """As it is now, with the contents of these attributes.

        Args:
            asked: names of attributes that the code may ask for.
            updated: buffers that it updates.
        """
        own = vars(module)
        buffers, parameters = dict(module._buffers), dict(module._parameters)
        tensors = (*parameters.items(), *buffers.items())
        marks = {n: marks_of(each, asked) for n, each in tensors if has_own(each)}
        insides = [(name, seen(own.get(name))) for name in names]
        return cls(
            module,
            type(module),
            dict(own),
            buffers,
            parameters,
            dict(module._modules),
            {
                name: each._version
                for name, each in module._buffers.items()
                if isinstance(each, Tensor) and counts_changes(each)
                if id(each) not in updated.ids
            },
            {name: each for name, each in insides if isinstance(each, Inside)},
            tuple([p is not None and p.requires_grad for p in parameters.values()]),
            {name: own_marks for name, own_marks in marks.items() if own_marks},
        )


class Seen:
    """The modules of a region at one time, and what their code reads of others.

    Args:
        modules: of the region, its own first.
        names: of each one's attributes that may change inside.
        reads: what their code reads of others.
        refusal: why they cannot run again as they are; None: they can.
        updated: buffers that their forward updates, and a re-run gets copies of.
        statistics: places of storages that normalizations of the model update.
    """

    def __init__(
        self,
        modules: list[nn.Module],
        names: list[list[str]],
        reads: Reads,
        refusal: str | None,
        updated: Updated = NONE_UPDATED,
        statistics: Set[int] = frozenset(),
    ) -> None:
        asked = reads.asked
        self.updated = updated
        self.parts = [
            Parts.of(module, own, asked, updated)
            for module, own in zip(modules, names, strict=True)
        ]
        self.reads = reads
        self.values = reads.values()
        own, foreign = [*attributes_of(modules), *reads.tops()], reads.foreign()
        self.deep = Deep(own, foreign, modules, asked)
        self.tensors: list[Tensor] = []
        """Parameters and buffers, but for `updated`."""
        self._inventory = self._listed(modules)
        self.refusal = (
            refusal
            or reads.refusal
            or self._uncounted()
            or self.deep.refusal
            or self._sharing(statistics)
        )
        self.placed = [each for each in self.tensors if has_place(each)]
        """Those of them that have bytes of their own."""
        self._fingerprint = self._inventory.fingerprint()
        self._glance = self._inventory.glance()
        self.inside = self.now()
        self.unversioned = self.now(versions=False)

    def _listed(self, modules: list[nn.Module]) -> Inventory:
        """See [Note: one pass]."""
        inventory = Inventory()
        for hooks in HOOKS_OF_ALL:
            inventory.hooks(hooks)
        for module, part in zip(modules, self.parts, strict=True):
            inventory.module(
                module, hooks=module is not modules[0], unread=self.updated.ids
            )
            inventory.marks_of_tensors(module, self.reads.asked)
            for held in (part.parameters, part.buffers):
                own = [each for each in held.values() if each is not None]
                self.tensors += [x for x in own if id(x) not in self.updated.ids]
            for name in part.insides:
                tell_of(part.own[name], inventory)
        self.reads.tell(inventory)
        self.deep.tell(inventory)
        return inventory

    def _uncounted(self) -> str | None:
        """Tensors whose changes nobody counts; None: there are none."""
        for part in self.parts:
            inner = [(name, part.own[name]) for name in part.insides]
            insides = part.insides.items()
            held = [(name, each) for name, inside in insides for each in inside.items]
            direct = (*part.parameters.items(), *part.buffers.items(), *inner)
            for name, value in (*direct, *held):
                if isinstance(value, Tensor) and is_lazy(value):
                    return f"{name} is not initialized yet"
                if isinstance(value, Tensor) and value.is_inference():
                    return f"{name} is an inference tensor, which counts no changes"
        return None

    def _sharing(self, statistics: Set[int]) -> str | None:
        read = (*self.tensors, *self._inventory.tensors) if statistics else ()
        places = storages(filter(has_place, read))
        shared = not statistics.isdisjoint(places)
        return "it reads statistics that a normalization updates" if shared else None

    def unwritten(self) -> Iterable[Tensor]:
        """Tensors that no forward is known to update, and whose bytes are theirs."""
        gathered = gathered_inside([part.module for part in self.parts])
        held = [p.parameters for p in self.parts if id(p.module) not in gathered]
        own = [each for one in held for each in one.values() if each is not None]
        read = (*own, *self._inventory.tensors)
        return {id(x): x for x in read if not is_gathered(x)}.values()

    def stands(self) -> bool:
        """Whether everything is the same now; if not, it may still be equal."""
        # In place, as `_look`: it is asked three times a call of a region.
        inventory = self._inventory
        if inventory.is_blind:
            return False
        seen, now = self._glance, inventory.glance()
        if seen is not None and now is not None and now.is_same(seen):
            return True
        try:
            stands = inventory.fingerprint().is_same(self._fingerprint)
        except ValueError:  # something is gone
            return False
        if stands:
            self._glance = now
        return stands

    def now(self, *, versions: bool = True) -> Fingerprint | None:
        """What is there now, without what FSDP2 takes out and puts back; None: it
        cannot be told.

        Args:
            versions: see `Inventory.fingerprint`.
        """
        return self._look(returning=False, versions=versions)

    def _look(self, **kinds: bool) -> Fingerprint | None:
        if self._inventory.is_blind:
            return None
        try:
            return self._inventory.fingerprint(**kinds)
        except ValueError:  # something is gone
            return None


def attributes_of(modules: list[nn.Module]) -> Iterator[tuple[str, Any]]:
    """Attributes of modules that may have something inside, as errors call them."""
    for module in modules:
        for name, value in vars(module).items():
            if name not in STANDARD and not isinstance(value, PLAIN):
                yield f"its attribute {name}", value


AS_IT_IS = nullcontext()
UNSEEN = Seen([], [], Reads(()), None)


class Before:
    """The modules of a region as its forward found them."""

    def __init__(self, path: str, seen: Seen) -> None:
        self.seen = seen
        self._path = path
        self._begun: Fingerprint | None = None
        """When the re-run that is under way began."""
        self.is_steady = False
        """Whether its forward has written nothing that has a version."""
        updated = seen.updated
        self._values = updated.values() if updated is not NONE_UPDATED else []
        """Of the buffers that it updates."""
        self.copies: set[int] = set()
        """Ids of those in their places, while the re-run is under way."""

    def forget(self) -> None:
        """It is not run again: hold nothing of what was seen."""
        self.seen, self._begun, self._values = UNSEEN, None, []

    def is_untouched(self) -> bool:
        """Whether the re-run has changed nothing so far; in the middle of it, where
        FSDP2 may have gathered weights. What has a version is not looked at again where
        the forward has written none of it."""
        begun, steady = self._begun, False
        if begun is not None and begun is self.seen.inside:
            steady = self.is_steady
            begun = self.seen.unversioned if steady else begun
        now = None if begun is None else self.seen.now(versions=not steady)
        return now is not None and begun is not None and now.is_same(begun)

    def restored(
        self, hooks: Callable[[Any], str | None]
    ) -> AbstractContextManager[None]:
        """A block in which they are as they were; made just before it begins.

        Args:
            hooks: tells of one of modules that would run twice; None: there is none.

        Raises:
            RegionError: something cannot be put back.
        """
        if not self.seen.stands():
            return self._restored(hooks)
        self._begun = self.seen.inside
        if self.seen.updated is NONE_UPDATED:
            return AS_IT_IS
        return self.seen.updated.replaced(self._values, self.copies)

    @contextmanager
    def _restored(self, hooks: Callable[[Any], str | None]) -> Iterator[None]:
        undo: Undo = []
        parts = self.seen.parts
        modules = [part.module for part in parts]
        gathered = gathered_inside(modules)
        try:
            self._put_back_others(undo)
            for part in parts:
                self._put_back(part, gathered, undo)
            reason = hooks(modules)
            if reason is not None:
                raise self._error(f"its hooks ({reason})")
            self._begun = self.seen.now()
            with self.seen.updated.replaced(self._values, self.copies):
                yield
        finally:
            self._begun = None  # it holds what it found
            while undo:
                undo.pop()()

    def _put_back_others(self, undo: Undo) -> None:
        """What lies outside of the modules, or deep inside."""
        reads, values, deep = self.seen.reads, self.seen.values, self.seen.deep
        if reads.changed(values) is not None:
            reads.put_back(values, undo)
            name = reads.changed(values)
            if name is not None:
                raise self._error(f"{name}, which its code reads,")
        if deep.changed() is not None:
            deep.put_back(undo)
            name = deep.changed()
            if name is not None:
                raise self._error(f"something inside {name}")

    def _put_back(self, part: Parts, gathered: set[int], undo: Undo) -> None:
        module = part.module
        held = part.parameters
        put_kind(module, part.kind, undo)
        if id(module) in gathered:
            # FSDP2's own hooks gather them when the module runs.
            held = faced(held, module._parameters)
        put_back(vars(module), part.own, undo)
        put_back(module._modules, part.modules, undo)
        put_back(module._buffers, part.buffers, undo)
        if put_back(module._parameters, held, undo):
            if not all(map(_is_here, held.values())):
                raise self._error("the memory of its weights")
        self._put_back_tensors(part, undo)
        for name, inside in part.insides.items():
            if not inside.is_unwritten():
                raise self._error(f"the tensors in its attribute {name}")
            put_inside(inside, undo)

    def _put_back_tensors(self, part: Parts, undo: Undo) -> None:
        """What is set on its parameters and buffers."""
        for (name, parameter), wanted in zip(
            part.parameters.items(), part.requires, strict=True
        ):
            if parameter is not None and parameter.requires_grad is not wanted:
                if not parameter.is_leaf:
                    raise self._error(f"requires_grad of {name}")
                parameter.requires_grad_(wanted)
                undo.append(_requiring(parameter, not wanted))
        for name, tensor in (*part.parameters.items(), *part.buffers.items()):
            if tensor is not None:
                put_marks(tensor, part.marks.get(name, {}), self.seen.reads.asked, undo)

    def _error(self, what: str) -> RegionError:
        return RegionError(
            f"{self._path} would run again, but {what} changed between its forward "
            "and its backward. Change it after backward, set regions to leave it "
            "out, or set recompute='off'."
        )


def _requiring(parameter: Tensor, value: bool) -> Callable[[], None]:
    def undo() -> None:
        parameter.requires_grad_(value)

    return undo


def has_own(tensor: Tensor | None) -> bool:
    """Whether a tensor has attributes of Python's."""
    return tensor is not None and bool(vars(tensor))


def marks_of(tensor: Any, asked: set[str]) -> dict[str, Any]:
    """The attributes of a tensor that code may ask for by these names."""
    return {name: value for name, value in vars(tensor).items() if name in asked}


def put_marks(tensor: Any, before: dict[str, Any], asked: set[str], undo: Undo) -> None:
    """Let a tensor have the same attributes of these names as before."""
    own = vars(tensor)
    now = marks_of(tensor, asked) if own else {}
    if now.keys() == before.keys() and all(now[name] is before[name] for name in now):
        return

    def put(marks: dict[str, Any], others: dict[str, Any]) -> None:
        for name in others.keys() - marks.keys():
            own.pop(name, None)
        own.update(marks)

    undo.append(lambda: put(now, before))
    put(before, now)


def faced(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Parameters as they were, but in the form that FSDP2 has them in now; see [Note:
    two faces]."""
    return {
        name: now[name] if is_other_face(value, now.get(name)) else value
        for name, value in before.items()
    }


def _is_here(tensor: Tensor | None) -> bool:
    """Whether its memory is there: FSDP frees that of weights that are not gathered."""
    if type(tensor) is not nn.Parameter or tensor.numel() == 0:
        return True
    return tensor.untyped_storage().nbytes() > 0
