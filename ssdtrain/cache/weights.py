"""Weights as inputs of recipes: what they were when an operator read them.

[Note: weights that change]
A recipe that reads a weight must read what the operator read. Three things can come
between:
- the weight is changed before its reader's result is saved (a cast of a weight saves
  nothing). So a weight counts for operators of the running forward alone, while its
  version and the number of optimizer steps are those of the forward's start; or for a
  reader that was found so before and since when both are the same (autocast's cache).
- an optimizer steps between two backwards. Fused ones leave the version as it was. So
  before any optimizer that owns a weight steps, the weights that recipes still need
  are copied, once each, and the recipes read the copies: in the usual loop there are
  none left by then.
- its data may be gone (ZeRO-3): a small one is copied at once, a large one refused.
- its data is replaced (`weight.data = other`): the operand is an alias of the old one.
A write in place that leaves the version (`weight.data.mul_(2)`) is not seen.
(tests/ssdtrain/rebuild/test_attacks.py)
"""

import threading
import weakref
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ssdtrain.cache.identity import extent_bytes
from ssdtrain.cache.living import Living
from ssdtrain.cache.record import Handle, Kept, ParameterView
from ssdtrain.forks import ForkedLock
from ssdtrain.gathered import is_gathered
from ssdtrain.rebuild.modes import without_modes

# A parameter whose data may be gone in backward is copied if it is this small.
COPIED_BYTES = 256 * 1024


class _Place(NamedTuple):
    """Where a parameter is, in a model that may replace it."""

    module: "weakref.ref[nn.Module]"
    name: str

    def parameter(self) -> nn.Parameter | None:
        """What is there now."""
        module = self.module()
        # A script module's `_parameters` has no `get`.
        if module is None or self.name not in module._parameters:
            return None
        return module._parameters[self.name]


class Weights:
    """The parameters of one session's modules."""

    def __init__(self) -> None:
        self._trusted: dict[int, _Place] = {}
        """By id. A weak reference would forbid `torch.utils.swap_tensors`."""
        self._states: dict[int, tuple[int, int]] = {}
        self._thread = -1
        self._first_node = 0
        self._num_steps = 0
        self._steps_at_start = 0
        self._read = Living[Handle]()
        self._lock = ForkedLock()

    def trust(self, root: nn.Module) -> None:
        """The data of its parameters stays in place from forward to backward.

        FSDP2's gathered parameters are other objects than the model's own, and so never
        among these.
        """
        for module in root.modules():
            for name, each in module._parameters.items():
                if type(each) is nn.Parameter and not is_gathered(each):
                    place = _Place(weakref.ref(module), name)
                    self._trusted.setdefault(id(each), place)

    def is_trusted(self, parameter: nn.Parameter) -> bool:
        """Whether its data stays in place."""
        place = self._trusted.get(id(parameter))
        return place is not None and place.parameter() is parameter

    def forward_begins(self) -> None:
        """Remember what operators read from now on: versions, and where data are."""
        self._thread = threading.get_ident()
        self._first_node = torch._C._autograd._get_sequence_nr()
        self._steps_at_start = self._num_steps
        self._states = {
            key: (parameter._version, parameter.data_ptr())
            for key, place in self._trusted.items()
            if (parameter := place.parameter()) is not None and id(parameter) == key
        }

    def state(self, parameter: nn.Parameter) -> Hashable:
        """Changes with every write that anybody can see."""
        return parameter._version, parameter.data_ptr(), self._num_steps

    def was_read_as_is(
        self, parameter: nn.Parameter, node: Any, *, was_saved: bool
    ) -> bool:
        """Whether the operator of this node read what the parameter holds now.

        Args:
            parameter: its input.
            node: the operator's.
            was_saved: whether the node saved it, at its present version.
        """
        begun = self._thread == threading.get_ident()
        if not begun or node._sequence_nr() < self._first_node:
            return False
        if self._num_steps != self._steps_at_start:
            return False
        version, place = self._states.get(id(parameter), (None, None))
        if place is not None and place != parameter.data_ptr():
            return False
        return was_saved or version == parameter._version

    def operand(
        self, parameter: nn.Parameter, view: ParameterView | None = None
    ) -> Handle | None:
        """A handle of its present value; None if backward may not find it.

        Args:
            parameter: an input of an operator.
            view: what of it; None: the whole.
        """
        whole = view or ParameterView(parameter, parameter._version, None, (), 0)
        if self.is_trusted(parameter):
            if whole.alias is None:
                whole = whole._replace(alias=parameter.detach())
            handle = Handle(whole)
            with self._lock.here():
                self._read.add(handle)
            return handle
        if parameter.nbytes <= COPIED_BYTES and _is_here(parameter):
            return Handle(_kept(_copy_of(parameter), whole))
        return None

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer is about to step: copy what recipes still read of its weights.

        For `torch.optim.optimizer.register_optimizer_step_pre_hook`.
        """
        groups = (group["params"] for group in optimizer.param_groups)
        stepped = {id(parameter) for group in groups for parameter in group}
        self._num_steps += 1
        if not self._read or stepped.isdisjoint(self._trusted):
            return
        with without_modes(), self._lock.here():
            copies: dict[int, Tensor] = {}
            for handle in self._read:
                source = handle.source
                if not isinstance(source, ParameterView):
                    continue
                parameter = source.parameter
                if id(parameter) not in stepped or parameter._version != source.version:
                    continue
                if not _is_here(parameter) or _is_replaced(source):
                    continue
                if id(parameter) not in copies:
                    copies[id(parameter)] = _copy_of(parameter)
                handle.source = _kept(copies[id(parameter)], source)
            self._read.clear()


def _is_here(parameter: Tensor) -> bool:
    """Whether its memory is there: FSDP frees that of a group that is not gathered, and
    the parameter still has its shape."""
    return extent_bytes(parameter)[1] <= parameter.untyped_storage().nbytes()


def _is_replaced(view: ParameterView) -> bool:
    """Whether its parameter has other data by now."""
    alias, now = view.alias, view.parameter.untyped_storage()
    return alias is not None and alias.untyped_storage()._cdata != now._cdata


def _copy_of(parameter: Tensor) -> Tensor:
    return parameter.detach().clone(memory_format=torch.preserve_format)


def _kept(copy: Tensor, view: ParameterView) -> Kept:
    """What a view of a parameter shows, of its copy."""
    if view.shape is not None:
        copy = copy.as_strided(view.shape, view.stride, view.offset)
    return Kept(copy, copy._version)
