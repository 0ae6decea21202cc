"""Sees what a forward changes besides its result.

[Note: side effects]
A forward that runs again repeats its side effects. So at each call the module's tensors
and Python state are looked at before and after it: versions of its buffers and of
tensors among its attributes; which attributes, buffers and parameters it has; numbers
and other values by equality, objects by identity; and one level into lists,
dictionaries and plain objects among the attributes (a counter in `self.stats`) and
among the globals and class attributes that its code reads. In the first calls, and for
code that names them, the states of `random` and NumPy are looked at as well. A call
that changed any of it does not run again: what it saved is stored. Python code that
could write elsewhere is looked for in the modules' bytecode: stores to globals and
enclosing functions' variables, and methods that change a list, set or dictionary found
there. What is written through functions in other modules is not seen.
(tests/ssdtrain/regions/test_side_effects.py)
"""

import dis
import random
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ssdtrain.gathered import gathered_inside
from ssdtrain.regions.before import Before, Parts, Seen, faced
from ssdtrain.regions.conditions import COLLECTING
from ssdtrain.regions.deep import PLAIN, STANDARD
from ssdtrain.regions.inventory import HOOKS_OF_ALL
from ssdtrain.regions.reads import Callee, Reads, functions_of
from ssdtrain.regions.updated import (
    NONE_UPDATED,
    STATISTICS,
    has_statistics,
    is_norm,
    storages_of,
    updated_by,
)

NUM_THOROUGH = 2
"""Calls without side effects in which slow states were compared, too."""
MAX_LOOKS = 4
"""Looks by name after which what was seen is not kept from one step to the next."""
KNOWN = ("ssdtrain.", "torch.distributed", COLLECTING)
"""Where hooks come from that may run twice."""
WRITES = frozenset(
    """
    append appendleft extend insert add update pop popleft popitem remove discard clear
    setdefault sort reverse
    """.split()
)
OPAQUE = (
    *(Tensor, nn.Module, type, FunctionType, BuiltinFunctionType, MethodType),
    threading.local,
)
NORMALIZING = frozenset(("batch_norm", "native_batch_norm", "instance_norm"))
"""Functions that write to running statistics and count no version."""
FOREIGN = {
    "transformer_engine": "keeps a history that no version counts",
    "megatron": "draws from random states of Megatron's own",
    "deepspeed": "may draw from random states of DeepSpeed's own",
}
"""Packages whose modules keep states that nobody here can see."""


class Watch:
    """One module and everything in it."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._last: Callable[[], Seen | None] = _nothing
        """What was seen last, if it is there."""
        self._num_looks = 0
        """How often something was another at the start of a call."""
        self._num_clean = 0
        self.is_trusted = False
        """Whether a call has been found clean."""
        self.is_thorough = True
        """Whether random states of Python and NumPy are compared, which is slow."""
        self._kinds: set[type] = set()
        self._given: list[Callee] = []
        own = vars(module).get("forward")
        self._own = list(functions_of("forward", own))
        """A forward that the module itself has had before it was wrapped."""
        self._reads = Reads(())
        """What the code of modules of these classes reads of others."""
        self._asks_for_statistics = False
        """Whether code beside that of batch normalizations reads what they update."""
        self._normalizes = False
        """Whether that code may update statistics past their versions."""
        self._modes: set[tuple[bool, ...]] = set()
        """`training` of all modules, as it was in some call."""
        self._trained = weakref.WeakSet[nn.Module]()
        """Normalizations of the model that were in training mode at some time. Of its
        own the others, which are frozen, update nothing."""
        self._normalizations: list[nn.Module] = []
        """Of the whole model."""
        self._outer: set[Any] = set()
        """Forwards of the modules around it, which it does not call."""

    def belongs_to(
        self, root: nn.Module, path: str, normalizations: list[nn.Module]
    ) -> None:
        """It is at this path of a model with these normalizations."""
        self._normalizations = normalizations
        self._trained.update(each for each in normalizations if each.training)
        names = path.split(".")
        for number in range(len(names)):
            around = root.get_submodule(".".join(names[:number]))
            kinds = type(around).__mro__
            self._outer.update(vars(kind).get("forward") for kind in kinds)

    def standing_refusal(self) -> str | None:
        """Why the module can never run again, whatever its calls do; None: it can."""
        for path, module in self._module.named_modules():
            name = path or type(self._module).__name__
            foreign = FOREIGN.get(type(module).__module__.partition(".")[0])
            if foreign is not None:
                return f"{name}: {type(module).__name__} {foreign}"
            if isinstance(module, torch.jit.ScriptModule):
                return f"{name} is scripted, and its state cannot be looked at"
            for value in vars(module).values():
                if isinstance(value, torch.Generator):
                    return f"{name} draws from a generator of its own"
            forward = getattr(type(module), "forward", None)
            if isinstance(forward, FunctionType):
                written = writes_elsewhere(forward)
                if written is not None:
                    return f"{name}.forward writes to {written}"
        return None

    def look(self) -> Seen:
        """A call begins: how its forward finds the modules.

        What was seen last is kept for the next call, and with it whatever attributes
        held: not where that is another thing in each step, and might be large.
        """
        before = self._last()
        if before is not None and before.stands():
            return before
        seen = self._see()
        if before is None or _change_of_modules(before, seen) is not None:
            self._num_looks += 1
        keep = self._num_looks <= MAX_LOOKS
        self._last = (lambda: seen) if keep else weakref.ref(seen)
        return seen

    def _see(self) -> Seen:
        modules = modules_of(self._module)
        kinds = set(map(type, modules))
        given = [*self._own, *_functions_among(modules)]
        if kinds != self._kinds or given != self._given:
            self._kinds, self._given = kinds, given
            self._reads = Reads(kinds, given, self._outer)
            others = {type(each) for each in modules if not is_norm(each)}
            asked = self._reads.asked
            if len(others) < len(kinds):
                asked = Reads(others, given, self._outer).asked
            self._asks_for_statistics = not STATISTICS.isdisjoint(asked)
            self._normalizes = not NORMALIZING.isdisjoint(asked)
            self._judge()
        modes = tuple([each.training for each in modules])
        if modes not in self._modes:  # its code may go other ways
            self._modes.add(modes)
            self._num_clean = 0
            self._judge()
        names = [list(_interesting(each)) for each in modules]
        self._trained.update(m for m in modules if m.training and is_norm(m))
        updated = updated_by(
            modules, self._trained, are_asked_for=self._asks_for_statistics
        )
        reason = self.hooks(modules)
        if updated is None or (self._asks_for_statistics and self._normalizations):
            reason = "others may read the statistics of its normalization"
            updated = NONE_UPDATED
        if any(self._may_update(each) for each in modules if not is_norm(each)):
            reason = "a normalization of its own may update statistics at times"
        # Nobody tells this one when a normalization of others begins to train.
        frozen = {m for m in modules if is_norm(m) and m not in self._trained}
        statistics = storages_of(n for n in self._normalizations if n not in frozen)
        return Seen(modules, names, self._reads, reason, updated, statistics)

    def _may_update(self, module: nn.Module) -> bool:
        """Whether code that is not batch normalization's may write to statistics."""
        if has_statistics(module):
            return True
        return self._normalizes and any(x is not None for x in module._buffers.values())

    def hooks(self, modules: Iterable[nn.Module]) -> str | None:
        """One of the modules whose forward hooks would run twice; None: there is
        none."""
        for hooks in HOOKS_OF_ALL:
            if not all(map(_is_known, hooks.values())):
                return "a forward hook of all modules would run twice"
        for module in modules:
            if module is self._module:  # its own hooks run around the forward
                continue
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                for hook in hooks.values():
                    if not _is_known(hook):
                        path = self._path_of(module)
                        return f"a forward hook of {path} would run twice"
        return None

    def _path_of(self, wanted: nn.Module) -> str:
        paths = (path for path, each in self._module.named_modules() if each is wanted)
        return next(paths, type(wanted).__name__)

    def slow(self) -> list[Any]:
        """Random states of Python and NumPy."""
        numpy = sys.modules.get("numpy")
        drawn = () if numpy is None else (numpy.random.get_state()[1:4],)
        return [random.getstate(), *drawn]

    def change(self, before: Before, slow: list[Any]) -> str | None:
        """What a forward has changed; None: nothing.

        Args:
            before: what was there when it began; it is told whether all stands.
            slow: what `slow` gave then; empty: nobody asked.
        """
        reason = None
        before.is_steady = before.seen.stands()
        if not before.is_steady:
            reason = _change_of_modules(before.seen, self._see())
            self._last = _nothing  # it may hold what the forward has replaced
        if reason is None and self._reads.came is not None:
            reason = f"it imported {self._reads.came}"
            self._kinds, self._last = set(), _nothing  # look at its code again
        if reason is None and slow and not all(map(_is_same, slow, self.slow())):
            reason = "a random state of Python or NumPy"
        if reason is None:
            self._num_clean += 1
            if self.is_thorough:
                self._judge()
        return reason

    def _judge(self) -> None:
        self.is_trusted = self._num_clean > 0
        self.is_thorough = self._num_clean < NUM_THOROUGH or self._reads.may_draw


def _nothing() -> None:
    """Nothing has been seen."""


def modules_of(root: nn.Module) -> list[nn.Module]:
    """The module and all in it, once each, in breadth: `modules()` takes ten times as
    long, and this runs at every call."""
    found = [root]
    seen = {id(root)}
    for module in found:
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                found.append(child)
    return found


def _functions_among(modules: Iterable[nn.Module]) -> Iterator[Callee]:
    """Functions that are attributes of modules, or are reached by some."""
    for module in modules:
        for name, value in vars(module).items():
            if name == "forward" or name not in STANDARD:
                yield from functions_of(name, value)


def _is_known(hook: Any) -> bool:
    """Ours, those of torch's own sharding, which expect to run again, and those of
    transformers that collect outputs, which a re-run goes without."""
    inner = getattr(hook, "func", hook)
    inner = getattr(inner, "__wrapped__", inner)
    home = str(getattr(inner, "__module__", ""))
    return home.startswith(KNOWN)


def _interesting(module: nn.Module) -> Iterator[str]:
    """Attributes that may change inside."""
    for name, value in vars(module).items():
        if name in STANDARD or isinstance(value, PLAIN):
            continue
        if type(value) in weakref.ProxyTypes:  # says that it is what it leads to
            continue
        if isinstance(value, Tensor | list | dict | set | deque):
            yield name
        elif not isinstance(value, OPAQUE) and hasattr(value, "__dict__"):
            yield name


def _change_of_modules(before: Seen, behind: Seen) -> str | None:
    if len(behind.parts) != len(before.parts):
        return "a module came or went"
    gathered = gathered_inside([part.module for part in before.parts])
    for old, new in zip(before.parts, behind.parts, strict=True):
        if id(old.module) in gathered:  # and may stay so until backward has ended
            old = old._replace(parameters=faced(old.parameters, new.parameters))
        reason = _difference_of_parts(old, new)
        if reason is not None:
            return reason
    reason = before.reads.changed(before.values)
    if reason is not None:
        return reason
    name = before.deep.changed()
    return None if name is None else f"something inside {name} changed"


def _difference_of_parts(old: Parts, new: Parts) -> str | None:
    if old.kind is not new.kind:
        return "the class of a module changed"
    for before, behind in (
        (old.own, new.own),
        (old.buffers, new.buffers),
        (old.parameters, new.parameters),
        (old.modules, new.modules),
    ):
        reason = _difference(before, behind)
        if reason is not None:
            return reason
    if old.written != new.written:
        return "a buffer was written"
    if not _is_same(old.marks, new.marks):
        return "an attribute of a parameter or buffer changed"
    for name, inside in old.insides.items():
        if not _is_same(inside, new.insides.get(name)):
            return f"something inside its attribute {name} changed"
    return None


def _difference(old: dict[str, Any], new: dict[str, Any]) -> str | None:
    if old.keys() != new.keys():
        names = ", ".join(map(str, old.keys() ^ new.keys()))
        return f"its attribute {names} came or went"
    for name, value in old.items():
        if value is not new[name] and not _is_same(value, new[name]):
            return f"its attribute {name} changed"
    return None


def _is_same(old: Any, new: Any) -> bool:
    if old is new:
        return True
    if type(old) is not type(new) or isinstance(old, OPAQUE):
        return False
    if isinstance(old, PLAIN):
        return bool(old == new or old != old)
    if isinstance(old, list | tuple):
        return len(old) == len(new) and all(map(_is_same, old, new))
    if isinstance(old, dict):
        same = old.keys() == new.keys()
        return same and all(_is_same(old[name], new[name]) for name in old)
    if isinstance(old, set):
        return bool(old == new)
    if type(old).__module__ == "numpy":
        return bool((old == new).all()) if hasattr(old, "all") else bool(old == new)
    return False


# -- bytecode -------------------------------------------------------------------------


def writes_elsewhere(function: FunctionType) -> str | None:
    """The global or enclosing variable that a function's own code writes to."""
    cells = dict(
        zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    )
    return _writes(function.__code__, function.__globals__, cells)


def _writes(code: CodeType, space: dict[str, Any], cells: dict[str, Any]) -> str | None:
    before: Any = None
    for step in dis.get_instructions(code):
        if step.opname in (
            "CACHE",
            "EXTENDED_ARG",
            "NOP",
            "PUSH_NULL",
            "COPY_FREE_VARS",
        ):
            continue
        if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            return f"the global {step.argval}"
        if step.opname in ("STORE_DEREF", "DELETE_DEREF") and step.argval in cells:
            return f"{step.argval} of the function around it"
        is_method = step.opname in ("LOAD_ATTR", "LOAD_METHOD")
        if is_method and before is not None and step.argval in WRITES:
            if isinstance(_loaded(before, space, cells), list | dict | set | deque):
                return str(before.argval)
        before = step
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found = _writes(constant, space, cells)
            if found is not None:
                return found
    return None


def _loaded(step: Any, space: dict[str, Any], cells: dict[str, Any]) -> Any:
    if step.opname == "LOAD_GLOBAL":
        return space.get(step.argval)
    if step.opname in ("LOAD_DEREF", "LOAD_CLOSURE") and step.argval in cells:
        try:
            return cells[step.argval].cell_contents
        except ValueError:  # not filled yet
            return None
    return None
