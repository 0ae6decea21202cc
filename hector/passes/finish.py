"""Last rewrites before lowering, after differentiation: instance selection.

The same rules run on the forward and on the backward program, so a value that the first
saves for the second is one node in both.
"""

from hector.ir.builder import Builder
from hector.ir.node import Node, Op
from hector.ir.types import ROW_DOMAINS
from hector.passes.rewrite import rule


@rule("bias in the epilogue", Op.ADD)
def bias_epilogue(b: Builder, n: Node) -> Node | None:
    """x W + b[type] as one GEMM instance."""
    for y, v in (n.inputs, n.inputs[::-1]):
        y = y.inputs[0] if y.op is Op.RESHAPE else y
        if y.op is not Op.LINEAR or len(y.inputs) > 2 or v.op is not Op.READ:
            continue
        vector = v.inputs[0]
        if v.index is not y.index or vector.type.width != y.type.width:
            continue
        bias = b.reshape(vector, y.shape)
        full = b.make(Op.LINEAR, (*y.inputs, bias), y.type, **dict(y.attrs))
        return b.reshape(full, n.shape)
    return None


@rule("linear of a single column", Op.LINEAR)
def scalar_linear(b: Builder, n: Node) -> Node | None:
    """(heads, 1) @ (heads, 1, N) is a product of a scalar and a row: a row operation,
    which can be fused where a GEMM could not."""
    x, w = n.inputs[:2]
    if x.shape[1] != 1 or len(n.inputs) > 2 or x.domain not in ROW_DOMAINS:
        return None
    return b.mul(x, b.read(b.reshape(w, n.shape), n.index, n.domain))


RULES = (bias_epilogue, scalar_linear)
