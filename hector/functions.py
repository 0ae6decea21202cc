"""Names that layer code may use; `hector.compile` reads them, nobody calls them.

They exist so that a layer's source is plain, checkable Python. Called outside of a
compiled layer they say so.
"""

from typing import Any, NoReturn


class StandIn:
    """A function that only the compiler gives a meaning to."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __call__(self, *args: Any, **named: Any) -> NoReturn:
        raise RuntimeError(
            f"hector.{self.__name__} has a meaning only inside a function decorated "
            f"with @hector.compile"
        )


def _stand_in(name: str) -> Any:
    return StandIn(name)


dot_prd = _stand_in("dot_prd")
leakyrelu = _stand_in("leakyrelu")
typed_linear = _stand_in("typed_linear")
edge_softmax = _stand_in("edge_softmax")
relation_degree = _stand_in("relation_degree")
scatter = _stand_in("scatter")
softmax = _stand_in("softmax")
concat = _stand_in("concat")
reshape = _stand_in("reshape")
linear = _stand_in("linear")
exp = _stand_in("exp")
log = _stand_in("log")
sqrt = _stand_in("sqrt")
relu = _stand_in("relu")
elu = _stand_in("elu")
gelu = _stand_in("gelu")
sigmoid = _stand_in("sigmoid")
tanh = _stand_in("tanh")
cos = _stand_in("cos")
sin = _stand_in("sin")
relation_max = _stand_in("relation_max")
relation_softmax = _stand_in("relation_softmax")
relation_sum = _stand_in("relation_sum")
relation_total = _stand_in("relation_total")
in_degree = _stand_in("in_degree")
positive = _stand_in("positive")
columns = _stand_in("columns")
