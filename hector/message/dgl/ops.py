"""`dgl.ops`: one message function, or one with its sum, of rows that are no features.

`u_mul_e_sum(g, x, y)`: rows of destinations; `u_mul_e(g, x, y)`: rows of edges;
`copy_u_max(g, x)`, `copy_e(g, x)`; all operands and reducers of `dgl.function`.
"""

from typing import Any

from torch import Tensor

from hector.message import functions as fn
from hector.message.functions import Side
from hector.message.nn.convs import relation_of
from hector.message.relation import edge_softmax

OPS = ("add", "sub", "mul", "div", "dot")
REDUCERS = ("sum", "mean", "max", "min")
__all__ = ["edge_softmax"]


def _made(name: str, reducer: str | None) -> Any:
    sides = [w for w in name.split("_") if len(w) == 1]
    fields = ["l", "r"][: len(sides)]

    def call(g: Any, *rows: Tensor) -> Tensor:
        if len(rows) != len(sides):
            raise TypeError(f"expected {len(sides)} tensors, got {len(rows)}")
        r = relation_of(g)
        with r.local_scope():
            frames = {"u": r.srcdata, "v": r.dstdata, "e": r.edata}
            for side, field, x in zip(sides, fields, rows, strict=True):
                frames[side][field] = x
            message = getattr(fn, name)(*fields, "m")
            if reducer is None:
                r.apply_edges(message)
                return r.edata["m"]
            r.update_all(message, getattr(fn, reducer)("m", "o"))
            return r.dstdata["o"]

    call.__name__ = call.__qualname__ = name if reducer is None else f"{name}_{reducer}"
    call.__doc__ = f"Return `{call.__name__}` of rows, in the order of its letters."
    return call


_NAMES = ["copy_u", "copy_e"]
_NAMES += [
    f"{a.value}_{op}_{b.value}" for a in Side for op in OPS for b in Side if a != b
]
for _name in _NAMES:
    for _how in (None, *REDUCERS):
        _call = _made(_name, _how)
        globals()[_call.__name__] = _call
        __all__.append(_call.__name__)
