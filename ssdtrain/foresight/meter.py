"""Prices operators one by one while a dispatch mode runs them, without a graph.

For whoever watches a step on the meta device with other questions than a graph answers
(`report/estimate.py`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ssdtrain.foresight.call import Call
from ssdtrain.foresight.capture import DTYPES, attributes
from ssdtrain.foresight.device import Device
from ssdtrain.foresight.graph import CALLER, Graph, Node, Storage, TensorInfo
from ssdtrain.foresight.lowering import lower
from ssdtrain.foresight.overheads import Phase
from ssdtrain.foresight.power import bound_us


class OperatorMeter:
    """Device and host time of single operators on one device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.num_generic = 0
        """Operators without a kernel model, priced as copies."""
        self._us = 0.0
        self._bound_us = 0.0
        self._joules = 0.0

    def device_us(
        self,
        func: Any,
        arguments: tuple[Sequence[Any], Mapping[str, Any]],
        inputs: Sequence[Tensor],
        results: Sequence[Tensor],
    ) -> float:
        """Kernel time of one operator whose inputs are not in the cache.

        Args:
            func: an `OpOverload`.
            arguments: as it was called: positional, by keyword.
            inputs: tensors among them.
            results: tensors it gave.
        """
        tensors = dict(
            enumerate(_info(x, i) for i, x in enumerate((*inputs, *results)))
        )
        numbers = tuple(tensors)
        node = Node(
            name=func._schema.name,
            phase=Phase.FORWARD,
            inputs=numbers[: len(inputs)],
            outputs=numbers[len(inputs) :],
            attr=attributes(func, *arguments),
        )
        storages = {
            n: Storage(num_bytes=t.num_bytes, born=CALLER, dies=CALLER)
            for n, t in tensors.items()
        }
        graph = Graph(nodes=(node,), tensors=tensors, storages=storages)
        lowered = lower(graph, node)
        self.num_generic += lowered.is_generic
        return sum(self._kernel_us(call) for call in lowered.calls)

    def _kernel_us(self, call: Call) -> float:
        us = self._device.kernel_us(call)
        self._us += us
        self._bound_us += bound_us(call, us, self._device.spec.compute_us(call))
        if self._device.power is not None:
            self._joules += self._device.power.joules(call)
        return us

    def slowdown(self, step_us: float) -> float:
        """By which factor all kernels so far are slower under the power limit, on
        average, in steps of `step_us` at the highest clock."""
        power = self._device.power
        if power is None or self._us <= 0.0:
            return 1.0
        clock = power.clock(step_us, self._bound_us, self._joules)
        return 1.0 + (1.0 / clock - 1.0) * self._bound_us / self._us

    def host_us(self, func: Any, phase: Phase) -> float:
        """Host time of one operator, the gap before it included."""
        cost = self._device.host.cost(phase, func._schema.name)
        return cost.total * self._device.host_scale


def _info(tensor: Tensor, number: int) -> TensorInfo:
    width = tensor.element_size()
    fallback = {1: "int8", 2: "int16", 4: "int32"}.get(width, "int64")
    return TensorInfo(
        shape=tuple(tensor.shape),
        dtype=DTYPES.get(tensor.dtype, fallback),
        stride=tuple(tensor.stride()),
        storage=number,
    )
