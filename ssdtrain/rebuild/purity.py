"""Code that writes to no tensor, told from its bytecode.

[Note: pure code]
A function is pure when its bytecode holds nothing but: arithmetic that makes new
values; calls and attributes by names that stand for out-of-place operators
(`PURE_NAMES`); torch, math, numbers and dtypes among its globals; parameters, buffers,
numbers and pure methods among what it reads from `self`; and when its arguments are
tensors and numbers. Every value in its frame is then a tensor, a number or one of
torch's own functions, whose names say that they write to nothing. So whatever path is
taken, from the call to the return no tensor that its frame made is written to, and no
other code sees one. Stores to attributes and items, in-place operators, `with`, loops,
closures, `out=` and `inplace=` are not pure. Opcodes are taken by name, so one that a
later Python adds makes code impure.
(tests/ssdtrain/rebuild/test_purity.py)
"""

import builtins
import dis
import inspect
import math
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# Python 3.10 to 3.12.
PURE_OPCODES = frozenset(
    """
    CACHE NOP RESUME EXTENDED_ARG PUSH_NULL PRECALL KW_NAMES COPY SWAP
    LOAD_FAST LOAD_FAST_CHECK LOAD_CONST LOAD_GLOBAL LOAD_ATTR LOAD_METHOD
    STORE_FAST DELETE_FAST POP_TOP DUP_TOP DUP_TOP_TWO ROT_TWO ROT_THREE ROT_FOUR
    CALL CALL_FUNCTION CALL_FUNCTION_KW CALL_METHOD RETURN_VALUE RETURN_CONST
    UNARY_NEGATIVE UNARY_POSITIVE UNARY_NOT UNARY_INVERT BINARY_OP BINARY_ADD
    BINARY_SUBTRACT BINARY_MULTIPLY BINARY_TRUE_DIVIDE BINARY_FLOOR_DIVIDE
    BINARY_MODULO BINARY_POWER BINARY_MATRIX_MULTIPLY BINARY_AND BINARY_OR BINARY_XOR
    BINARY_SUBSCR BINARY_SLICE COMPARE_OP IS_OP CONTAINS_OP BUILD_TUPLE BUILD_LIST
    BUILD_SLICE LIST_EXTEND LIST_TO_TUPLE UNPACK_SEQUENCE JUMP_FORWARD JUMP_ABSOLUTE
    JUMP_IF_FALSE_OR_POP JUMP_IF_TRUE_OR_POP POP_JUMP_IF_FALSE POP_JUMP_IF_TRUE
    POP_JUMP_IF_NONE POP_JUMP_IF_NOT_NONE POP_JUMP_FORWARD_IF_FALSE
    POP_JUMP_FORWARD_IF_TRUE POP_JUMP_FORWARD_IF_NONE POP_JUMP_FORWARD_IF_NOT_NONE
    """.split()
)
# Of tensors, of torch and of math. None of them writes to a tensor, whatever its
# positional arguments; `out=` and `inplace=` are refused by name. Not silu, relu and
# others of torch.nn.functional that take `inplace` by position.
PURE_NAMES = frozenset(
    """
    abs add amax amin bfloat16 broadcast_to chunk clone contiguous cos device dim div
    double dtype eps erf exp expand expand_as finfo flatten float float16 float32
    float64 functional gelu glu half hardshrink int32 int64 is_contiguous log log1p long
    matmul max maximum mean min minimum movedim mul narrow ndim neg nn norm numel
    permute pi pow prod reciprocal reshape rsqrt shape sigmoid sin size softplus
    softshrink split sqrt square squeeze std sub sum swapaxes t tanh tiny to transpose
    type_as unbind unflatten unsqueeze var view view_as where zeros_like
    """.split()
)
WRITING_KEYWORDS = frozenset(("out", "inplace"))
PURE_GLOBALS: tuple[Any, ...] = (torch, nn, nn.functional, math, float, int, len)
NUMBERS = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size)
STRANGE_FLAGS = (
    inspect.CO_VARARGS
    | inspect.CO_VARKEYWORDS
    | inspect.CO_GENERATOR
    | inspect.CO_COROUTINE
    | inspect.CO_ASYNC_GENERATOR
)
MAX_CALLS = 4
"""Most pure methods of a forward."""


class Certificate(NamedTuple):
    """A pure forward."""

    forward: types.CodeType
    methods: Mapping[str, types.CodeType]
    """Methods that it calls, by name."""
    values: frozenset[str]
    """What else it reads from `self`."""

    def covers(self, code: types.CodeType) -> bool:
        """Whether this is its code."""
        # By identity: equal code may run with other globals.
        return code is self.forward or any(
            code is each for each in self.methods.values()
        )

    def holds_for(self, module: nn.Module, arguments: list[Any]) -> bool:
        """Whether a call of this module with these arguments is pure."""
        own = vars(module)
        for name, code in self.methods.items():
            method = getattr(type(module), name, None)
            if name in own or getattr(method, "__code__", None) is not code:
                return False
        return all(_is_benign(value) for value in arguments) and all(
            _is_own_value(module, name) for name in self.values
        )


class Purity:
    """Certificates of the modules of one session."""

    def __init__(self) -> None:
        self._known: dict[types.FunctionType, Certificate | None] = {}

    def certificate(self, module: nn.Module) -> Certificate | None:
        """Of the forward of the module's class; None: not pure."""
        forward = getattr(type(module), "forward", None)
        if not isinstance(forward, types.FunctionType):
            return None
        if forward not in self._known:
            self._known[forward] = _certificate(type(module), forward)
        return self._known[forward]


def _certificate(
    kind: type[nn.Module], forward: types.FunctionType
) -> Certificate | None:
    methods: dict[str, types.CodeType] = {}
    values: set[str] = set()
    waiting = [forward]
    while waiting:
        names = own_names(waiting.pop())
        if names is None or len(methods) > MAX_CALLS:
            return None
        for name in names - set(methods):
            method = getattr(kind, name, None)
            if isinstance(method, types.FunctionType):
                methods[name] = method.__code__
                waiting.append(method)
            else:
                values.add(name)
    return Certificate(forward.__code__, methods, frozenset(values))


def own_names(method: types.FunctionType) -> set[str] | None:
    """The names that a method reads from `self`; None: it is not pure."""
    code = method.__code__
    if not _is_plain_function(method):
        return None
    own, found = code.co_varnames[0], set()
    steps = list(_steps(code))
    for step, after in zip(steps, [*steps[1:], None], strict=True):
        if step.opname not in PURE_OPCODES:
            return None
        if step.opname == "BINARY_OP" and step.argrepr.endswith("="):
            return None
        if step.opname == "LOAD_GLOBAL" and not _is_pure_global(method, step.argval):
            return None
        if "_FAST" in step.opname and step.argval == own:
            # `self` is read from, and neither replaced nor handed to anybody.
            if step.opname != "LOAD_FAST" or after is None or after.is_jump_target:
                return None
            if after.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
                return None
            found.add(after.argval)
    return found if _attributes_are_pure(steps, own) else None


def _is_plain_function(method: types.FunctionType) -> bool:
    """All but its instructions."""
    code = method.__code__
    if code.co_argcount == 0 or code.co_flags & STRANGE_FLAGS or method.__closure__:
        return False
    for constant in code.co_consts:
        if isinstance(constant, tuple) and not WRITING_KEYWORDS.isdisjoint(constant):
            return False
    defaults = (*(method.__defaults__ or ()), *(method.__kwdefaults__ or {}).values())
    return all(type(value) in NUMBERS for value in defaults)


def _attributes_are_pure(steps: list[dis.Instruction], own: str) -> bool:
    before: dis.Instruction | None = None
    for step in steps:
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            of_own = before is not None and before.opname == "LOAD_FAST"
            of_own = of_own and before is not None and before.argval == own
            if not of_own and step.argval not in PURE_NAMES:
                return False
        before = step
    return True


def _steps(code: types.CodeType) -> Iterator[dis.Instruction]:
    is_target = False
    for step in dis.get_instructions(code):
        is_target = is_target or bool(step.is_jump_target)
        if step.opname in ("CACHE", "EXTENDED_ARG", "NOP"):
            continue
        yield step._replace(is_jump_target=is_target)
        is_target = False


def _is_pure_global(method: types.FunctionType, name: str) -> bool:
    if name in method.__globals__:
        value = method.__globals__[name]
    else:
        value = getattr(builtins, name, None)
    return type(value) in NUMBERS or any(value is pure for pure in PURE_GLOBALS)


def _is_benign(value: Any) -> bool:
    return type(value) in (Tensor, nn.Parameter) or type(value) in NUMBERS


def _is_own_value(module: nn.Module, name: str) -> bool:
    """A parameter, a buffer or a number; no property, whose code could do anything."""
    tensors = module._parameters if name in module._parameters else module._buffers
    if name in tensors:
        tensor = tensors[name]
        return tensor is None or (_is_benign(tensor) and tensor.grad_fn is None)
    # A property is found on the class as itself, and its code does not run.
    nothing = object()
    value = vars(module).get(name, nothing)
    if value is nothing:
        value = getattr(type(module), name, nothing)
    return type(value) in NUMBERS
