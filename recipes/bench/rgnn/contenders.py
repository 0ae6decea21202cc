"""Builds a contender's step for a cell; all contenders share PyG's parameters."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from hector.datasets.generate import TABLE_3_3, generate, scaled
from hector.graph import HeteroGraph
from hector.train import LayerKind, LayerSpec
from hector.train.model import compiled_layer
from recipes.bench.rgnn.cells import SETTINGS, Cell, Contender, Task
from recipes.bench.rgnn.pyg import layer_spec, pyg_conv, wrap
from recipes.bench.rgnn.sorted_product import (
    SortedHGT,
    SortedRGAT,
    SortedRGCN,
    grouped_linear,
    loop_linear,
    reached,
)

SORTED = {
    LayerKind.RGCN: SortedRGCN,
    LayerKind.RGAT: SortedRGAT,
    LayerKind.HGT: SortedHGT,
}
DTYPES = {
    "float32": torch.float32,
    "tf32": torch.float32,
    "bfloat16": torch.bfloat16,
}


class Layer(NamedTuple):
    """A layer with its input, ready to step."""

    module: nn.Module
    graph: HeteroGraph
    x: Tensor
    labels: Tensor

    def clear(self) -> None:
        """Drop all gradients."""
        self.module.zero_grad(set_to_none=True)
        self.x.grad = None


class Graphs:
    """The graphs of Table 3.3: kept in host memory, one at a time on the device."""

    def __init__(self, device: torch.device, scale: float) -> None:
        self.device, self.scale = device, scale
        self._kept: dict[str, HeteroGraph] = {}
        self._current: tuple[str, HeteroGraph] | None = None

    def get(self, name: str) -> HeteroGraph:
        """Return the graph on the device, without what was kept with it before."""
        if self._current is None or self._current[0] != name:
            self._current = None
            if name not in self._kept:
                spec = scaled(TABLE_3_3[name], self.scale)
                self._kept[name] = generate(spec, seed=0, device=self.device).to("cpu")
            self._current = name, self._kept[name].replace().to(self.device)
        return self._current[1]


def build(cell: Cell, contender: Contender, graph: HeteroGraph, seed: int = 0) -> Layer:
    """The contender's layer with the parameters that `seed` gives PyG's layer."""
    device, dtype = graph.device, DTYPES[cell.dtype]
    torch.backends.cuda.matmul.allow_tf32 = cell.dtype == "tf32"
    spec = layer_spec(cell.model, cell.width, cell.width)
    torch.manual_seed(seed)
    conv = pyg_conv(spec, graph, fast=contender is Contender.PYG_FAST)
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in conv.named_parameters():
            # Biases start at 0 and RGAT's l2 at whatever memory held.
            if parameter.dim() == 1 or name == "l2":
                parameter.copy_(torch.rand(parameter.shape, generator=gen) - 0.5)
    conv = conv.to(device, dtype)
    rows = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(graph.num_nodes, cell.width, generator=rows, device=device)
    x = x.to(dtype).requires_grad_(cell.task is Task.TRAINING)
    size = (graph.num_nodes,)
    labels = torch.randint(0, cell.width, size, generator=rows, device=device)
    module = _module(contender, conv, spec, graph)
    module.train(cell.task is Task.TRAINING)
    return Layer(module, graph, x, labels)


def _module(
    contender: Contender, conv: nn.Module, spec: LayerSpec, graph: HeteroGraph
) -> nn.Module:
    if contender.ours:
        layer = compiled_layer(spec, graph)
        layer.load_state_dict(conv.state_dict())
        weight = next(conv.parameters())
        layer.to(weight.device, weight.dtype)
        if contender in SETTINGS:  # HECTOR leaves the choice to the cost model
            layer.set_optimization(contender.value.removeprefix("hector-"))
        return layer
    if contender in (Contender.SORTED_LOOP, Contender.SORTED_GROUPED):
        grouped = contender is Contender.SORTED_GROUPED
        linear = grouped_linear if grouped else loop_linear
        return SORTED[spec.kind](conv, graph, linear)
    return wrap(conv, graph)


def step_of(layer: Layer, task: Task) -> Callable[[], Tensor]:
    """One epoch: inference, or forward, loss and backward (Wu, section 3.4.1)."""
    module, graph, x, labels = layer
    clear = layer.clear

    def infer() -> Tensor:
        with torch.no_grad():
            out: Tensor = module(x, graph)
            return out

    def train() -> Tensor:
        clear()
        loss = functional.cross_entropy(module(x, graph), labels)
        loss.backward()
        return loss

    return infer if task is Task.INFERENCE else train


def difference(layer: Layer, reference: Layer) -> float:
    """Largest difference of two contenders' outputs over the largest output, on the
    nodes that PyG computes."""
    rows = reached(layer.graph)
    got = step_of(layer, Task.INFERENCE)()[rows].float()
    want = step_of(reference, Task.INFERENCE)()[rows].float()
    return float((got - want).abs().max() / want.abs().max())
