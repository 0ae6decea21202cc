"""Whole compiled layers against the same layer in float64, outputs and gradients."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hector.frontend import CompiledLayer
from hector.graph import HeteroGraph
from hector.nn.layers import hgt, rgat_outputs, rgcn
from hector.nn.rgat import RGATOptions
from hector.passes.pipeline import Optimizations
from hector.runtime import Backend
from recipes import hector_layers

HEADS = 2
IN, WIDTH = (64, 32) if torch.cuda.is_available() else (16, 8)
"""Triton's interpreter takes twice as long for the larger ones."""
OUT = HEADS * WIDTH

Make = Callable[
    [int, int, Callable[..., Tensor]], tuple[CompiledLayer, tuple[Any, ...]]
]
"""(relations, node types, random parameter) -> layer and arguments after features."""


def _rgcn(r: int, t: int, p: Callable[..., Tensor]) -> Any:
    return rgcn, (p(r, IN, OUT), p(IN, OUT), p(OUT), "mean")


def _rgat(r: int, t: int, p: Callable[..., Tensor]) -> Any:
    options = RGATOptions(heads=HEADS, width=WIDTH)
    names = SimpleNamespace(weight=p(r, IN, OUT), q=p(OUT, HEADS), k=p(OUT, HEADS))
    return rgat_outputs, (names, options)


def _hgt(r: int, t: int, p: Callable[..., Tensor]) -> Any:
    names = SimpleNamespace(**{n: p(t, IN, OUT) for n in ("k", "q", "v", "out")})
    for name in ("bk", "bq", "bv", "b_out"):
        setattr(names, name, p(t, OUT))
    names.k_rel, names.v_rel = p(r, HEADS, WIDTH, WIDTH), p(r, HEADS, WIDTH, WIDTH)
    names.p_rel, names.skip = p(r, HEADS), p(t)
    return hgt, (names, HEADS, WIDTH**-0.5, True)


def _gcn(r: int, t: int, p: Callable[..., Tensor]) -> Any:
    return hector_layers.gcn, (p(IN, OUT), p(OUT))


def _gat(r: int, t: int, p: Callable[..., Tensor]) -> Any:
    return hector_layers.gat, (p(IN, OUT), p(HEADS, WIDTH), p(HEADS, WIDTH), HEADS)


def _gatv2(r: int, t: int, p: Callable[..., Tensor]) -> Any:
    weights = (p(r, IN, OUT), p(r, IN, OUT), p(r, HEADS, WIDTH))
    return hector_layers.relational_gatv2, (*weights, HEADS)


def _comp_gcn(r: int, t: int, p: Callable[..., Tensor]) -> Any:
    return hector_layers.comp_gcn, (p(r, IN), p(r, IN, OUT), p(IN, OUT))


def _simple_hgn(r: int, t: int, p: Callable[..., Tensor]) -> Any:
    names = SimpleNamespace(weight=p(IN, OUT), residual=p(IN, OUT))
    names.att_src, names.att_dst = p(HEADS, WIDTH), p(HEADS, WIDTH)
    names.edge, names.w_edge, names.att_edge = p(r, 8), p(8, OUT), p(HEADS, WIDTH)
    return hector_layers.simple_hgn, (names, HEADS)


def _edge_mlp(r: int, t: int, p: Callable[..., Tensor]) -> Any:
    return hector_layers.edge_mlp, (p(r, 2 * IN, OUT), p(OUT, OUT))


CHECKS: dict[str, Make] = {
    "rgcn": _rgcn,
    "rgat": _rgat,
    "hgt": _hgt,
    "gcn": _gcn,
    "gat": _gat,
    "relational_gatv2": _gatv2,
    "comp_gcn": _comp_gcn,
    "simple_hgn": _simple_hgn,
    "edge_mlp": _edge_mlp,
}


def run(
    name: str,
    graph: HeteroGraph,
    dtype: torch.dtype,
    options: dict[str, Any],
    rounded: torch.dtype,
    second: bool = False,
) -> list[Tensor]:
    """Output and gradients of everything, from parameters rounded to `rounded`;
    `second`: gradients of the squared gradient of the features."""
    gen = torch.Generator().manual_seed(0)
    leaves: list[Tensor] = []

    def parameter(*shape: int) -> Tensor:
        size = shape[-2] if len(shape) > 1 else 1
        value = torch.randn(*shape, generator=gen) * size**-0.5
        value = value.to(rounded).to(graph.device, dtype)
        leaves.append(value.requires_grad_())
        return value

    x = parameter(graph.num_nodes, IN)
    with torch.no_grad():
        x.mul_(graph.num_nodes**0.5)
    layer, arguments = CHECKS[name](
        graph.num_edge_types, graph.num_node_types, parameter
    )
    layer = layer.with_options(**options)
    out = layer(graph, x, *arguments)
    out = out[0] if isinstance(out, tuple) else out
    slope = torch.linspace(-1, 1, out.numel(), dtype=torch.float64)
    slope = slope.to(rounded).to(graph.device, dtype).view_as(out)
    grads = torch.autograd.grad(out, leaves, slope, create_graph=second)
    report = layer.executable(graph, x, *arguments).report
    if report.fallbacks:
        raise RuntimeError(f"{report.fallbacks} operations fell back to PyTorch")
    if second:
        # A bias has none: what it is added to has a slope without it.
        twice = torch.autograd.grad(grads[0].square().sum(), leaves, allow_unused=True)
        return [t for t in twice if t is not None]
    return [out.detach(), *grads]


def layer_error(
    name: str, graph: HeteroGraph, dtype: torch.dtype, settings: Optimizations
) -> float:
    """Largest relative error over the output and all gradients, against float64."""
    return _error(name, graph, dtype, settings, second=False)


def second_error(
    name: str, graph: HeteroGraph, dtype: torch.dtype, settings: Optimizations
) -> float:
    """Largest relative error over the gradients of the features' squared gradient."""
    return _error(name, graph, dtype, settings, second=True)


def _error(
    name: str,
    graph: HeteroGraph,
    dtype: torch.dtype,
    settings: Optimizations,
    second: bool,
) -> float:
    options = {"backend": Backend.TRITON, "optimizations": settings}
    got = run(name, graph, dtype, options, dtype, second)
    plain = {"backend": Backend.REFERENCE, "optimizations": Optimizations()}
    exact = run(name, graph, torch.float64, plain, dtype, second)
    return max(_relative(a, b) for a, b in zip(got, exact, strict=True))


def _relative(got: Tensor, want: Tensor) -> float:
    if not bool(torch.isfinite(got).all()):
        return float("inf")
    gap = float((got.double() - want).abs().max())
    return gap / (float(want.abs().max()) + 1e-30)
