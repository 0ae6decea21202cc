"""What lies between a base tensor and the view of it that autograd saves.

[Note: the node between]
A recipe makes what the base's own node made. Between the base and the saved view may be
a Python Function that got the base, wrote to it in a kernel which raises no version
(Triton, CUDA, NumPy), and returned it. So at every use the nodes between are looked at.
Torch's own views write nothing. A Function writes nothing if its code shows that: it
returns its input, as those of FSDP2, ZeRO-3 and Megatron do, and calls nothing but
methods of its context and `detach`. What is reached in any other way is stored.
(tests/ssdtrain/rebuild/test_between.py)
"""

import dis
import types
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction, Function

from ssdtrain.rebuild.purity import PURE_OPCODES

MAX_NODES = 8
"""Most nodes between a base and a view that are looked at."""
_OPCODES = PURE_OPCODES | {"COPY_FREE_VARS", "LOAD_DEREF", "STORE_ATTR", "UNPACK_EX"}
_SETS_CONTEXT = _OPCODES | {"INPLACE_ADD", "INPLACE_SUBTRACT"}
_CALLED = frozenset(
    "detach mark_non_differentiable save_for_backward set_materialize_grads "
    "view_as".split()
)
"""Methods that write to no tensor."""
_WAYS_TO_BYTES = frozenset(("data", "grad"))
"""Attributes through which a store or a method would change a tensor."""
_known: dict[types.CodeType, bool] = {}
_views: dict[type[Any], bool] = {}


def is_unwritten(view: Tensor, base: Tensor) -> bool:
    """Whether nothing between a base and a view of it can have written to the base."""
    if view is base:
        return True
    node, source = view.grad_fn, base.grad_fn
    output = view.output_nr
    for _ in range(MAX_NODES):
        if node is source:
            return True
        if node is None:
            return False  # under `no_grad`: what was between has left no node
        edges = node.next_functions
        kind = type(node)
        is_view = _views.get(kind)
        if is_view is None:
            if issubclass(kind, BackwardCFunction):
                if len(edges) <= output or not writes_nothing(kind._forward_cls):
                    return False
                if len(edges) != len(node._input_metadata):
                    return False
                node, output = edges[output]
                continue
            # Generated nodes of in-place operators stand behind another version.
            is_view = kind.__module__ == "builtins" and kind.__name__[-1].isdigit()
            _views[kind] = is_view
        if not is_view or not edges:
            return False
        node, output = edges[0]
    return False


def is_as_made(tensor: Tensor) -> bool:
    """Whether it is what its base's node made, as far as versions and nodes tell."""
    base = tensor._base
    return tensor._version == 0 and (base is None or is_unwritten(tensor, base))


def writes_nothing(function: type[Function]) -> bool:
    """Whether the code of a Function's forward writes to no tensor."""
    forward, context = function.forward, function.setup_context
    if not _is_harmless(forward, _OPCODES):
        return False
    default: Any = Function.setup_context
    return context is default or _is_harmless(context, _SETS_CONTEXT)


def _is_harmless(method: Any, opcodes: frozenset[str]) -> bool:
    code = getattr(method, "__code__", None)
    if not isinstance(code, types.CodeType):
        return False
    known = _known.get(code)
    if known is None:
        known = _known[code] = _looks_harmless(code, opcodes)
    return known


def _looks_harmless(code: types.CodeType, opcodes: frozenset[str]) -> bool:
    num_calls = num_known = 0
    for step in dis.get_instructions(code):
        name = step.opname
        if name not in opcodes:
            return False
        if name == "BINARY_OP" and step.argrepr.endswith("="):
            if opcodes is not _SETS_CONTEXT:
                return False
        if name in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR"):
            if step.argval in _WAYS_TO_BYTES:
                return False
            num_known += step.argval in _CALLED and name != "STORE_ATTR"
        num_calls += name in ("CALL", "CALL_FUNCTION", "CALL_FUNCTION_KW") or (
            name == "CALL_METHOD"
        )
    return num_calls <= num_known
