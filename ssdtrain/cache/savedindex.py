"""What a region's forward saves, told by its order alone.

[Note: saved by index]
A region that is known to run again needs no more of a saved tensor than its index: the
re-run saves the same ones in the same order. So hooks of the call's own stand on top of
the session's while its forward runs. They put the tensor into a list and give autograd
the index. Nothing else is done at pack, because there are twenty to sixty of them in a
layer. What safety needs is done for all at once when the forward ends: shapes and
strides, to be compared with those of the re-run; which tensors an operator may fill
after autograd saved them; and probes of versions. Then the bytes go.

Looks that were equal twice are compared by torch's own guards from then on, which make
no objects. A probe is needed only where somebody can still write to the bytes: whoever
holds the tensor or shares its storage, such as a view, the table that it is a part of,
or what made it. All others are gone with their forward.
(tests/ssdtrain/regions/test_saved_index.py)
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._C._dynamo import guards
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ssdtrain.cache.handles import KeptHandle, ParameterHandle, ParameterViewHandle
from ssdtrain.cache.identity import is_plain, stamp_of
from ssdtrain.cache.inputs import Inputs
from ssdtrain.cache.record import Handle, Holding, Lane
from ssdtrain.cache.table import RegionPart
from ssdtrain.cache.wrapped import counter_of
from ssdtrain.errors import ForkedError, RegionError
from ssdtrain.gathered import MARK
from ssdtrain.rebuild import modes
from ssdtrain.regions.find import Region
from ssdtrain.regions.updated import Updated
from ssdtrain.regions.weights import UNSHARED, uses_of

_TENSOR: Any = torch._C.TensorBase
# Called for all tensors at once, by `map`: without a call of Python for each.
DETACH, SIZE, STRIDE = _TENSOR.detach, _TENSOR.size, _TENSOR.stride
IS_ZERO = _TENSOR._is_zerotensor
DTYPE, LEAF = attrgetter("dtype"), attrgetter("is_leaf")
VERSION = attrgetter("_version")
KIND = attrgetter("layout", "device", "is_nested", "is_quantized")
DEVICE = attrgetter("device")
(ALONE,) = map(sys.getrefcount, [object()])
"""References to what a list alone holds, as `map` counts them."""
Alike = Callable[..., bool]
"""Whether tensors are of the types, devices, dtypes, shapes and strides of others."""


class SavingCall(Protocol):
    """A `RegionCall`, as what is saved in it sees it."""

    drops: bool
    holding: Holding
    lane: Lane
    number: int
    parameter_bytes: int
    part: RegionPart | None
    region: Region
    saved: "SavedTensors"
    special: set[int]
    updated: Updated

    def handed_over(self, num_bytes: int) -> None: ...
    def handle_of(self, index: int, tensor: Tensor) -> Any: ...
    def made_for(self, handle: Any) -> Tensor: ...
    def other(self, number: int, look: Any, made: Any) -> RegionError: ...
    def save(self, tensor: Tensor) -> Any: ...
    def use(self, index: int) -> Tensor: ...
    def use_planned(self, index: int) -> Tensor: ...


class FromRegion(NamedTuple):
    """Where the tensor of a handle comes from that a region's re-run makes."""

    call: SavingCall


class SavedIndex(tuple[SavingCall, int]):
    """A saved tensor of a region call, by its order there. A tuple: made without a call
    of Python."""

    __slots__ = ()
    number = -1
    epsilon = None
    seal = None

    @property
    def source(self) -> FromRegion:
        """No recipe reads it."""
        return FromRegion(self[0])

    @property
    def name(self) -> str:
        """For errors."""
        return f"a tensor saved in {self[0].region.path}"

    def get(self) -> Tensor:
        """The tensor; see `RegionCall.use_planned`."""
        call, index = self
        return call.use_planned(index)

    def stayed(self) -> Tensor:
        """The tensor, in a forked child.

        Raises:
            ForkedError: its region would have to run again.
        """
        call, index = self
        tensor = call.saved.at_hand(index)
        if tensor is None:
            raise made_elsewhere(self.name)
        return tensor


def made_elsewhere(name: str) -> ForkedError:
    """The error of a forked child that asks for what a region makes again."""
    return ForkedError(
        f"{name} is made again by the process that forked this one; run backward where "
        "forward ran, or fork before forward."
    )


class SealedIndex(Handle):
    """A `SavedIndex` that `verify` looks at."""

    __slots__ = ("index",)

    def __init__(self, index: SavedIndex) -> None:
        self.index = index
        self.number = -1
        self.epsilon = None
        self.seal = None

    @property
    def source(self) -> FromRegion:  # type: ignore[override]
        """No recipe reads it."""
        return self.index.source

    def get(self) -> Tensor:
        """The tensor; see `RegionCall.use_planned`."""
        return self.index.get()


class SavedLayout(NamedTuple):
    """What the saved tensors of a call look like. One call of a region is mostly like
    the one before, and then shares it."""

    looks: list[Any]
    """Shape, dtype and strides of each."""
    stored: set[int]
    """Those that a plan stores."""
    own_bytes: list[int]
    """Bytes that each adds to those before it and to the arguments."""
    num_bytes: int
    kinds: list[Any]
    """Type and device of each, if all are bytes of one storage; else empty."""
    alike: Alike | None = None
    """Whether others look so; None: they are compared one by one."""


NO_LAYOUT = SavedLayout([], set(), [], 0, [])


class SavedTensors:
    """The tensors that one region call saved, and what is known of them."""

    __slots__ = (
        *("is_known", "layout", "leaves", "made", "probes", "stored", "tensors"),
        "versions",
    )

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        """As autograd saved them; until the forward ends, or for good if the call does
        not run again."""
        self.versions: list[int] = []
        self.made: list[Tensor | None] = []
        """By the re-run; None: it was asked for, or has not run."""
        self.probes: list[Tensor | None] = []
        """They share the version counters, and hold no bytes; None: nobody can write to
        these bytes. Empty before."""
        self.leaves: list[bool] = []
        """Which may be filled by their operator after autograd saved them."""
        self.stored: set[int] = set()
        """Those that autograd gets from elsewhere: a plan stores them."""
        self.layout = NO_LAYOUT
        self.is_known = False
        """Whether guards have found all as in the layout."""

    def at_hand(self, index: int) -> Tensor | None:
        """A tensor that is on the device; None: the region must run again."""
        if self.probes:
            return self.made[index]
        return self.tensors[index].detach()

    def look(self, last: SavedLayout | None, inputs: Inputs) -> SavedLayout:
        """Look at the tensors before they go.

        Args:
            last: layout of the region's call before.
            inputs: what its forward was given: their bytes are not its own.
        """
        tensors = self.tensors
        self.leaves = [*map(LEAF, tensors)]
        if last is not None and last.stored == self.stored:
            if are_alike(last.alike, last.looks, tensors):
                self.layout, self.is_known = last, True
                return last
        looks = looks_of(tensors)
        if last is not None and last.looks == looks and last.stored == self.stored:
            if last.kinds and last.alike is None:
                last = last._replace(alike=alike_to(tensors))
        else:
            own_bytes = _own_bytes(tensors, inputs.tensors)
            for index in self.stored:
                own_bytes[index] = 0
            kinds = [] if any(map(is_odd, tensors)) else kinds_of(tensors)
            last = SavedLayout(looks, self.stored, own_bytes, sum(own_bytes), kinds)
        self.layout = last
        return last

    def drop(self, nothing: Tensor) -> list[Tensor]:
        """Let go of the bytes.

        Args:
            nothing: an empty tensor on the device.

        Returns:
            Those that stay: sparse ones and the like have no probe without bytes.
        """
        tensors = self._taken()
        self.made = [None] * len(tensors)
        self.probes = [None] * len(tensors)
        if self._are_bytes(tensors):
            for index in self._to_probe(tensors):
                self.probes[index] = probe_of(tensors[index], nothing)
            return []
        stays: list[Tensor] = []
        for index, tensor in enumerate(tensors):
            if is_plain(tensor):
                probe = probe_of(tensor, nothing)
            elif is_traceable_wrapper_subclass(tensor):
                probe = counter_of(tensor)
            else:
                probe = tensor.detach()
                stays.append(probe)
            self.probes[index] = probe
        return stays

    def _are_bytes(self, tensors: list[Tensor]) -> bool:
        """Whether each is bytes of one storage. The layout, of equal looks, says all
        but what looks do not tell."""
        kinds = self.layout.kinds
        if not kinds or self.is_known:
            return bool(kinds)
        return not any(map(IS_ZERO, tensors)) and kinds_of(tensors) == kinds

    def _to_probe(self, tensors: list[Tensor]) -> Iterable[int]:
        """Which of them somebody can write to. All, if one was written to since it was
        saved: then backward may not ask for it."""
        held = [*map(sys.getrefcount, tensors)]
        if [*map(VERSION, tensors)] != self.versions:
            return range(len(tensors))
        both = enumerate(zip(held, uses_of(tensors), strict=True))
        return [n for n, own in both if own[0] > ALONE or own[1] > UNSHARED]

    def hand_out(self, found: list[Tensor]) -> int:
        """Take what was made again; return its bytes."""
        made_bytes = 0
        for index, before in enumerate(self.made):
            if before is None and index not in self.stored:
                self.made[index] = found[index]
                made_bytes += self.layout.own_bytes[index]
        found.clear()
        return made_bytes

    def forget(self) -> int:
        """Let go of what was made again and not used; return its bytes."""
        num_bytes = 0
        for index, made in enumerate(self.made):
            if made is not None:
                self.made[index] = None
                num_bytes += self.layout.own_bytes[index]
        return num_bytes

    def keep(self) -> None:
        """The call does not run again: hold the bytes, and no graph."""
        self.tensors = [*map(DETACH, self._taken())]

    def _taken(self) -> list[Tensor]:
        """The tensors; the list that the hooks fill, which live on with the graph, is
        empty from now on."""
        tensors = [*self.tensors]
        self.tensors.clear()
        return tensors


def probe_of(tensor: Tensor, nothing: Tensor) -> Tensor:
    """An alias of a plain tensor that shares its version counter and holds no bytes."""
    probe = tensor.detach()
    # An attention's seed lies on the host.
    probe.data = (
        nothing if tensor.device == nothing.device else nothing.to(tensor.device)
    )
    return probe


def alike_to(tensors: list[Tensor]) -> Alike | None:
    """Whether other tensors look like these, as torch's guards tell; None: they
    cannot."""
    make: Any = getattr(guards, "TensorGuards", None)
    if make is None or not tensors:
        return None
    firsts: dict[int, int] = {}
    for number, tensor in enumerate(tensors):
        firsts.setdefault(id(tensor), number)
    own = [tensors[number] for number in firsts.values()]
    check: Alike = make(
        *own,
        dynamic_dims_sizes=[*map(list, map(SIZE, own))],
        dynamic_dims_strides=[*map(list, map(STRIDE, own))],
    ).check
    if len(own) == len(tensors):
        return check
    if len(own) == 1:
        return None
    # Guards take no tensor twice.
    without, again = itemgetter(*firsts.values()), [firsts[id(t)] for t in tensors]

    def alike(*others: Tensor) -> bool:
        same = all(map(is_, others, map(others.__getitem__, again)))
        return same and check(*without(others))

    return alike


def are_alike(alike: Alike | None, looks: list[Any], tensors: list[Tensor]) -> bool:
    """Whether guards find the tensors like those of these looks; False: they do not, or
    there are none."""
    return alike is not None and len(looks) == len(tensors) and alike(*tensors)


def is_odd(tensor: Tensor) -> bool:
    """Whether it is more than bytes of one storage."""
    usual = torch.strided, tensor.device, False, False
    return type(tensor) is not Tensor or KIND(tensor) != usual


def kinds_of(tensors: list[Tensor]) -> list[Any]:
    """The type of each, then the device of each."""
    return [*map(type, tensors), *map(DEVICE, tensors)]


def looks_of(tensors: list[Tensor]) -> list[Any]:
    """Shape, dtype and strides of each."""
    try:
        return [
            *zip(
                map(SIZE, tensors),
                map(DTYPE, tensors),
                map(STRIDE, tensors),
                strict=True,
            )
        ]
    except (RuntimeError, NotImplementedError):
        return [*map(look_of, tensors)]  # a nested or sparse one has none of these


def look_of(tensor: Tensor) -> Any:
    """Shape, dtype and strides, as far as it has them."""
    if tensor.layout is not torch.strided:
        return tensor.shape, tensor.dtype, None
    if tensor.is_nested:
        return torch.Size(()), tensor.dtype, None
    return tensor.shape, tensor.dtype, tensor.stride()


def _own_bytes(tensors: list[Tensor], arguments: list[Tensor]) -> list[int]:
    seen: set[Any] = set()
    for each in arguments:
        if type(each) is Tensor and each.layout is torch.strided:
            seen.add((stamp_of(each), each._version))
    found = []
    for tensor in tensors:
        num_bytes = 0
        if type(tensor) is Tensor and tensor.layout is torch.strided:
            if not tensor.is_nested and not tensor._is_zerotensor():
                key = stamp_of(tensor), tensor._version
                if key not in seen:
                    seen.add(key)
                    base = tensor._base
                    num_bytes = (tensor if base is None else base).nbytes
        found.append(num_bytes)
    return found


def hooks_of(  # noqa: C901 (in place: no calls)
    call: SavingCall, unpack_others: Callable[[Any], Tensor]
) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """The hooks of one region call.

    Args:
        call: whose forward is about to run.
        unpack_others: the session's own hook.
    """
    saved, special = call.saved, call.special
    tensors, versions = saved.tensors, saved.versions
    planned: Mapping[int, Any] = {} if call.part is None else call.part.using
    use, use_planned = call.use, call.use_planned
    add, note = tensors.append, versions.append
    task, updated = torch._C._current_graph_task_id, call.updated.ids
    dispatching, overriding, inferring = modes.ASKED

    def pack(tensor: Tensor) -> Any:
        kind = type(tensor)
        if dispatching() or overriding() or task() != -1:
            return call.save(tensor)
        if kind is Tensor:
            base = tensor._base
            if updated and (id(tensor) in updated or id(base) in updated):
                return call.save(tensor)
            if base is None or type(base) is Tensor:
                index = len(tensors)
                note(tensor._version)
                add(tensor)
                if index in special:
                    return call.handle_of(index, tensor)
                return SavedIndex((call, index))
            if type(base) is Parameter and not hasattr(base, MARK):
                call.parameter_bytes += tensor.nbytes
                view = base, tensor._version, tensor.detach()
                return ParameterViewHandle(view)
        elif kind is Parameter:
            call.parameter_bytes += tensor.nbytes
            return ParameterHandle((tensor, tensor._version))  # type: ignore[arg-type]
        return call.save(tensor)

    def unpack(handle: Any) -> Tensor:
        kind = type(handle)
        if kind is SavedIndex:
            if not (dispatching() or overriding() or inferring()):
                index = handle[1]
                return use_planned(index) if index in planned else use(index)
        elif kind is ParameterHandle or kind is KeptHandle:
            tensor: Tensor = handle[0]
            if tensor._version == handle[1]:
                return tensor
        elif kind is ParameterViewHandle:
            parameter, version, shown = handle
            if type(shown) is Tensor and parameter._version == version:
                return shown
        return unpack_others(handle)

    return pack, unpack
