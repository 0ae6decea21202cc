"""Masks of edges for all layers of a model: what explainers train."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor, nn

from hector.nn.common import CompiledConv

M = TypeVar("M", bound=nn.Module)


def _layers(model: nn.Module) -> list[CompiledConv]:
    found = [m for m in model.modules() if isinstance(m, CompiledConv)]
    if not found:
        raise ValueError(
            f"expected a model with layers of hector.nn, {type(model).__name__} has "
            "none; graphs of hector.message have graph.masked(mask)"
        )
    return found


@contextmanager
def masked(
    model: nn.Module, mask: Tensor | Mapping[tuple[str, str, str], Tensor]
) -> Iterator[None]:
    """Multiply the messages of each edge by `mask` in every layer inside.

    Messages are masked where PyG masks them: before they are reduced, after attention's
    softmax. Means divide by all neighbours, masked or not.

    Args:
        model: with layers of `hector.nn`.
        mask: [edges] in the order of `edge_index`; for `HGTConv` on dicts, by edge
            type. Gets a gradient.

    Raises:
        ValueError: a model without such layers.
    """
    layers = _layers(model)
    before = [layer.edge_mask for layer in layers]
    for layer in layers:
        # Not by assignment, which would make a parameter of the layer of it.
        vars(layer)["edge_mask"] = mask
    try:
        yield
    finally:
        for layer, old in zip(layers, before, strict=True):
            vars(layer)["edge_mask"] = old


def explainable(model: M) -> M:
    """Let PyG's explainers (GNNExplainer, PGExplainer) find the layers of `hector.nn`
    in a model; it is returned. Imports torch_geometric.

    PyG sets masks on modules of its class `MessagePassing`. Each layer gets one without
    parameters, whose mask it applies; its `state_dict` stays the same.
    """
    from torch_geometric.nn import MessagePassing

    class PygMask(MessagePassing):  # type: ignore[misc]
        """Holds a mask, and shows a layer's results to PyG's hooks. PyG compiles a
        class when it makes an object of it: one of `MessagePassing` itself would change
        all layers."""

        def forward(self, out: Any) -> Any:
            return out

    for layer in _layers(model):
        if "pyg_mask" not in layer._modules:
            layer.register_forward_hook(_shown)
        layer.pyg_mask = PygMask()
    return model


def _shown(layer: nn.Module, _: Any, out: Any) -> Any:
    return layer.get_submodule("pyg_mask")(out)
