"""`dgl.ops`: one message function, or one with its sum, of rows that are no features.

`u_mul_e_sum(g, x, y)`: rows of destinations; `u_mul_e(g, x, y)`: rows of edges;
`copy_u_max(g, x)`, `copy_e(g, x)`; all operands and reducers of `dgl.function`.
"""

from typing import Any

from torch import Tensor

from hector.message import functions as fn
from hector.message.functions import Side
from hector.message.joined import edge_softmax
from hector.message.nn.convs import relation_of

OPS = ("add", "sub", "mul", "div", "dot")
REDUCERS = ("sum", "mean", "max", "min")
__all__ = ["edge_softmax"]


class _Product:
    """Call with (graph, rows, ...), in the order of the name's letters."""

    def __init__(self, name: str, reducer: str | None) -> None:
        self.name, self.reducer = name, reducer
        self.sides = [w for w in name.split("_") if len(w) == 1]

    def __call__(self, g: Any, *rows: Tensor) -> Tensor:
        """Return rows of destinations, or of edges without a reducer."""
        if len(rows) != len(self.sides):
            raise TypeError(f"expected {len(self.sides)} tensors, got {len(rows)}")
        r, fields = relation_of(g), ["l", "r"][: len(rows)]
        with r.local_scope():
            frames = {"u": r.srcdata, "v": r.dstdata, "e": r.edata}
            for side, field, x in zip(self.sides, fields, rows, strict=True):
                frames[side][field] = x
            message = getattr(fn, self.name)(*fields, "m")
            if self.reducer is None:
                r.apply_edges(message)
                return r.edata["m"]
            r.update_all(message, getattr(fn, self.reducer)("m", "o"))
            return r.dstdata["o"]


_NAMES = ["copy_u", "copy_e"]
_NAMES += [
    f"{a.value}_{op}_{b.value}" for a in Side for op in OPS for b in Side if a != b
]
for _name in _NAMES:
    for _how in (None, *REDUCERS):
        _whole = _name if _how is None else f"{_name}_{_how}"
        globals()[_whole] = _Product(_name, _how)
        __all__.append(_whole)
