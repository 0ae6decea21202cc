"""Prices operators one by one while a dispatch mode runs them, without a graph.

For whoever watches a step on the meta device with other questions than a graph answers
(`report/estimate.py`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ssdtrain.foresight.capture import DTYPES, attributes
from ssdtrain.foresight.device import Device
from ssdtrain.foresight.graph import CALLER, Graph, Node, Storage, TensorInfo
from ssdtrain.foresight.lowering import lower
from ssdtrain.foresight.overheads import Phase


class OperatorMeter:
    """Device and host time of single operators on one device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.num_generic = 0
        """Operators without a kernel model, priced as copies."""

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
        return sum(self._device.kernel_us(call) for call in lowered.calls)

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
