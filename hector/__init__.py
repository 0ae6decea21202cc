"""Compiles relational GNN layers to GEMM and traversal kernels (Wu, chapter 3)."""

from hector.capture import CapturedBatches, CapturedSampler, CapturedStep
from hector.frontend import CompiledLayer, compile
from hector.frontend.source import UnsupportedPythonError
from hector.functions import (
    columns,
    concat,
    cos,
    dot_prd,
    edge_softmax,
    elu,
    exp,
    gelu,
    in_degree,
    leakyrelu,
    linear,
    log,
    positive,
    relation_degree,
    relation_max,
    relation_softmax,
    relation_total,
    relu,
    reshape,
    scatter,
    sigmoid,
    sin,
    softmax,
    sqrt,
    tanh,
    typed_linear,
)
from hector.graph import HeteroGraph
from hector.ir.kernels import SegmentMapping
from hector.message import batch
from hector.passes.pipeline import Optimizations
from hector.runtime import Backend, Options

__all__ = [
    "Backend",
    "CapturedBatches",
    "CapturedSampler",
    "CapturedStep",
    "CompiledLayer",
    "HeteroGraph",
    "Optimizations",
    "Options",
    "SegmentMapping",
    "UnsupportedPythonError",
    "batch",
    "columns",
    "compile",
    "concat",
    "cos",
    "dot_prd",
    "edge_softmax",
    "elu",
    "exp",
    "gelu",
    "in_degree",
    "leakyrelu",
    "linear",
    "log",
    "positive",
    "relation_degree",
    "relation_max",
    "relation_softmax",
    "relation_total",
    "relu",
    "reshape",
    "scatter",
    "sigmoid",
    "sin",
    "softmax",
    "sqrt",
    "tanh",
    "typed_linear",
]
