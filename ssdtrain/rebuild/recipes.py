"""Operators that can run again: one table, by the autograd node of their result.

A recipe gets the `Producer` of a tensor. It returns the expression that makes it again,
or None. Add a rule to `RULES`, or a user's recipe with `ssdtrain.recipe`.

[Note: matrix products]
A product takes several times as long as an element-wise kernel, so products and
attention are rebuilt under plans that know each tensor's price, and where
`recompute="full"` asks for them. The libraries choose a kernel by the exact shapes and
strides, so each of these is a class of its own. A factor that was not saved (of a
frozen weight's layer) is reached through its edge. A product of more dimensions is one
of two, seen in another shape by `_unsafe_view`. Where their nodes follow one another,
nobody can have written to what lies between: see `AutogradGraph.is_composite`.
(tests/ssdtrain/rebuild/test_products.py)

[Note: fused attention]
Attention that drops is stored: its kernel draws from the process-wide generator, which
must not be set back while other threads may draw from it. So are the statistics (one
number a row and head, a fiftieth of the output): they have no node of their own.
(tests/ssdtrain/rebuild/test_attention.py)
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ssdtrain.rebuild.expression import Expression, Operand
from ssdtrain.rebuild.node import OpRule, Producer, RecipeBuilder, signed

NodeRead = Callable[[Producer], Any]
"""What a recipe takes from the node."""
OpRules = dict[str, OpRule]
"""By the name of the node."""
HALF = (torch.bfloat16, torch.float16)
RecipeFunction = TypeVar("RecipeFunction", bound=RecipeBuilder)


# -- what recipes are made of ----------------------------------------------------------


def saved(name: str) -> NodeRead:
    """A tensor that the node saved."""
    return lambda node: node.saved(name)


def edge(index: int) -> NodeRead:
    """An input that the node did not save."""
    return lambda node: node.edge(index)


def factor(name: str, index: int) -> NodeRead:
    """An input that is saved only if the other one needs a gradient."""

    def read(node: Producer) -> Operand | None:
        found = node.saved(name)
        return node.edge(index) if found is None else found

    return read


SELF, INPUT = saved("self"), edge(0)


def constant(name: str) -> NodeRead:
    """A number or a text that the node keeps."""
    return lambda node: node.constant(name)


def dimension(name: str) -> NodeRead:
    """A dimension that the node keeps."""
    return lambda node: node.dimension(name)


def shape(node: Producer) -> tuple[int, ...]:
    """Of the result."""
    return node.shape


def made_by(
    function: Callable[..., Tensor], *reads: NodeRead | str, **constants: NodeRead
) -> RecipeBuilder:
    """`function(*operands, **constants)`, if every operand can be had.

    Args:
        function: pure, and at module level.
        reads: the operands, in order; a text is a constant that node and function
            call the same.
        constants: all others, by the function's names.
    """
    operands = tuple(read for read in reads if not isinstance(read, str))
    constants |= {read: constant(read) for read in reads if isinstance(read, str)}

    def recipe(node: Producer) -> Expression | None:
        found = _read_all(node, operands)
        if found is None:
            return None
        values = {name: read(node) for name, read in constants.items()}
        return node.rebuilt_by(function, *found, **values)

    return recipe


def _read_all(node: Producer, reads: tuple[NodeRead, ...]) -> list[Operand] | None:
    found: list[Operand] = []
    for read in reads:
        operand = read(node)
        if operand is None:
            return None
        found.append(operand)
    return found


# -- sums, casts and copies -----------------------------------------------------------


def sum_of(node: Producer) -> Expression | None:
    """Of two tensors; or of a tensor and a number that the running module tells."""
    first = node.edge(0)
    if first is None:
        return None
    if node.has_edge(1):
        second = node.edge(1)
        return node.rebuilt_by(torch.add, first, second, alpha=node.constant("alpha"))
    # Python's `1.0 + x` is add(x, 1.0).
    return node.rebuilt_by(torch.add, first, node.addend())


def cast(node: Producer) -> Expression | None:
    """Of an activation or, under autocast, of a parameter.

    A widened tensor whose source nobody keeps is stored narrow: the way back is exact,
    and cheaper than a product would be.
    """
    source = node.source_dtype(0) if node.is_at_hand else None
    narrows = source in HALF and node.dtype is torch.float32
    found = node.rebuilt_by(
        to_dtype, node.edge(0, may_be_expensive=not narrows), dtype=node.dtype
    )
    if found is not None or source is None or not narrows:
        return found
    return node.rebuilt_by(to_dtype, node.narrowed(source), dtype=node.dtype)


def to_dtype(source: Tensor, dtype: torch.dtype) -> Tensor:
    """Always a new tensor."""
    return source.to(dtype, copy=True)


def narrow(wide: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a widened tensor as it was before, in memory of its own.

    A CPU's cast to bfloat16 gives all NaN the same bits, which widened again are not
    the tensor's: there the upper half of every element is copied.
    """
    if dtype is not torch.bfloat16 or wide.device.type != "cpu":
        return wide.to(dtype)
    upper = int(sys.byteorder == "little")
    halves = torch.empty(0, dtype=torch.int16, device="cpu").set_(
        wide.untyped_storage(),
        2 * wide.storage_offset() + upper,
        wide.shape,
        [2 * step for step in wide.stride()],
    )
    found = torch.empty_like(wide, dtype=dtype)
    found.view(torch.int16).copy_(halves)
    return found


def copy(node: Producer) -> Expression | None:
    """`clone()` and `contiguous()`."""
    layout = node.layout
    stride = None if layout is None else layout.stride
    return node.rebuilt_by(copy_to, node.edge(0), stride=stride)


def copy_to(source: Tensor, stride: tuple[int, ...] | None) -> Tensor:
    """A copy with this stride; contiguous when it is not known."""
    if stride is None:
        return source.clone(memory_format=torch.contiguous_format)
    target = torch.empty_strided(
        source.shape, stride, dtype=source.dtype, device=source.device
    )
    return target.copy_(source)


def permuted(node: Producer) -> tuple[int, ...]:
    """The order of the dimensions."""
    return tuple(signed(each) for each in node.constant("dims"))


# -- norms and dropout ----------------------------------------------------------------


def layer_norm(node: Producer) -> Expression | None:
    """`F.layer_norm` with a weight, with or without a bias."""
    return _norm(node, normalize, with_bias=True)


def rms_norm(node: Producer) -> Expression | None:
    """`F.rms_norm` where the device has a fused kernel."""
    return _norm(node, normalize_rms, with_bias=False)


def _norm(
    node: Producer, function: Callable[..., Tensor], *, with_bias: bool
) -> Expression | None:
    """See [Note: epsilon] in frame.py."""
    source = node.saved("input")
    epsilon = None if source is None else node.epsilon("input")
    if epsilon is None:
        return None
    operands = [source, node.saved("weight")]
    if with_bias and node.has_saved("bias"):
        operands.append(node.saved("bias"))
    return node.rebuilt_by(
        function,
        *operands,
        shape=tuple(node.constant("normalized_shape")),
        epsilon=epsilon.value,
    )


def normalize(
    source: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    shape: tuple[int, ...],
    epsilon: float,
) -> Tensor:
    """Layer norm with an optional bias, all over the last dimensions `shape`."""
    return F.layer_norm(source, shape, weight, bias, epsilon)


def normalize_rms(
    source: Tensor, weight: Tensor, *, shape: tuple[int, ...], epsilon: float | None
) -> Tensor:
    """RMS norm; an epsilon of None is the dtype's own."""
    return F.rms_norm(source, shape, weight, epsilon)


def dropped(node: Producer) -> Expression | None:
    """The output of a fused dropout, from its input and the mask that it saved."""
    rate = node.constant("p")
    if not 0.0 < rate < 1.0:
        return None
    return node.rebuilt_by(
        torch.ops.aten.native_dropout_backward,
        node.edge(0),
        node.saved("result1"),
        scale=1.0 / (1.0 - rate),
    )


# -- products and attention -----------------------------------------------------------


reshaped = made_by(Tensor.view, edge(0), size=shape)


def folded_product(node: Producer) -> Expression | None:
    """A product of more dimensions. It is called after what it costs."""
    found = reshaped(node)
    source = None if found is None else found.operands[0]
    if found is not None and isinstance(source, Expression) and source.exact:
        return replace(found, recipe=source.recipe)
    return found


def attention_recipe(
    function: Callable[..., Tensor], bias: str | None = None
) -> RecipeBuilder:
    """An attention that drops nothing: [Note: fused attention].

    Args:
        function: takes query, key, value, perhaps a bias, and the constants.
        bias: the name under which the node saves one; None: it cannot be given.
    """

    def recipe(node: Producer) -> Expression | None:
        if node.constant("dropout_p"):
            return None
        operands = [node.saved(name) for name in ("query", "key", "value")]
        for name in ("attn_bias", "attn_mask"):
            if node.has_saved(name):
                operands.append(node.saved(name) if name == bias else None)
        return node.rebuilt_by(
            function,
            *operands,
            causal=node.constant("is_causal"),
            scale=node.constant("scale"),
        )

    return recipe


# Query, key and value of shape (B, heads, S, head size).


def attend_flash(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float | None
) -> Tensor:
    """The flash kernel."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention
    made = kernel(query, key, value, 0.0, causal, False, scale=scale)
    return made[0]  # type: ignore[no-any-return]


def attend_cudnn(*operands: Tensor, causal: bool, scale: float | None) -> Tensor:
    """cuDNN's kernel."""
    kernel = torch.ops.aten._scaled_dot_product_cudnn_attention
    return _with_bias(kernel, *operands, causal=causal, scale=scale)


def attend_efficient(*operands: Tensor, causal: bool, scale: float | None) -> Tensor:
    """The memory-efficient kernel, which takes a mask."""
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    return _with_bias(kernel, *operands, causal=causal, scale=scale)


def _with_bias(
    kernel: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    *,
    causal: bool,
    scale: float | None,
) -> Tensor:
    """The log-sum is asked for: without it another kernel runs."""
    made = kernel(query, key, value, bias, True, 0.0, causal, scale=scale)
    return made[0]  # type: ignore[no-any-return]


def attend_on_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool,
    scale: float | None,
) -> Tensor:
    """The flash kernel of CPUs, which takes a mask."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    made = kernel(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)
    return made[0]  # type: ignore[no-any-return]


# -- the table -------------------------------------------------------------------------


def _made(
    function: Callable[..., Tensor], *reads: NodeRead | str, **constants: NodeRead
) -> OpRule:
    """An operator that costs little more than reading its operands: `made_by`."""
    return OpRule(made_by(function, *reads, **constants))


def _view(function: Callable[..., Tensor], **constants: NodeRead) -> OpRule:
    """A view of its input."""
    return OpRule(made_by(function, INPUT, **constants), is_view=True)


_expensive = partial(OpRule, is_expensive=True)
_reshaped = OpRule(reshaped, is_view=True)

RULES: OpRules = {
    # Activations. Those that save their result read their input at its edge.
    "GeluBackward0": _made(F.gelu, SELF, "approximate"),
    "SiluBackward0": _made(F.silu, SELF),
    "SoftplusBackward0": _made(F.softplus, SELF, "beta", "threshold"),
    "HardshrinkBackward0": _made(F.hardshrink, SELF, "lambd"),
    "SoftshrinkBackward0": _made(F.softshrink, SELF, "lambd"),
    # SELU as well: F.elu takes no scales.
    "EluBackward0": _made(torch.ops.aten.elu, SELF, "alpha", "scale", "input_scale"),
    "LeakyReluBackward0": _made(F.leaky_relu, SELF, "negative_slope"),
    "HardswishBackward0": _made(F.hardswish, SELF),
    "HardtanhBackward0": _made(F.hardtanh, SELF, "min_val", "max_val"),
    "MishBackward0": _made(F.mish, SELF),
    "GluBackward0": _made(F.glu, SELF, dim=dimension("dim")),
    "TanhBackward0": _made(torch.tanh, INPUT)._replace(result="result"),
    "SigmoidBackward0": _made(torch.sigmoid, INPUT)._replace(result="result"),
    # Gated products, unfused RMS norm, dropout from its noise, scaling, sums.
    "PowBackward0": _made(torch.pow, SELF, "exponent"),
    "MulBackward0": _made(torch.mul, factor("self", 0), factor("other", 1)),
    "AddBackward0": OpRule(sum_of),
    "SubBackward0": _made(torch.sub, INPUT, edge(1), "alpha"),
    "NegBackward0": _made(torch.neg, INPUT),
    # Norms and dropout.
    "NativeLayerNormBackward0": OpRule(layer_norm),
    "FusedRmsNormBackward0": OpRule(rms_norm),
    "NativeDropoutBackward0": OpRule(dropped),
    # Casts and copies, and views between an operator and its input. They save nothing.
    "ToCopyBackward0": OpRule(cast),
    "CloneBackward0": OpRule(copy),
    "UnsafeViewBackward0": OpRule(folded_product),  # no view: its storage is its own
    "ViewBackward0": _reshaped,
    "ViewAsBackward0": _reshaped,
    "AliasBackward0": _reshaped,
    "ReshapeAliasBackward0": _reshaped,
    "ExpandBackward0": _view(torch.broadcast_to, size=shape),
    "TransposeBackward0": _view(
        torch.transpose, dim0=dimension("dim0"), dim1=dimension("dim1")
    ),
    "TBackward0": _view(torch.t),
    "PermuteBackward0": _view(torch.permute, dims=permuted),
    "UnsqueezeBackward0": _view(torch.unsqueeze, dim=dimension("dim")),
    # No recipes: they save their result, so an edge to them has a value.
    "ExpBackward0": OpRule(result="result"),
    "ReluBackward0": OpRule(result="result"),
    "RsqrtBackward0": OpRule(result="result"),
    "SoftmaxBackward0": OpRule(result="result"),
    "SafeSoftmaxBackward0": OpRule(result="result"),
    # [Note: matrix products]
    "AddmmBackward0": _expensive(
        made_by(
            torch.addmm, INPUT, factor("mat1", 1), factor("mat2", 2), "beta", "alpha"
        ),
        reads="mat1",
    ),
    "MmBackward0": _expensive(
        made_by(torch.mm, factor("self", 0), factor("mat2", 1)), reads="self"
    ),
    "BmmBackward0": _expensive(
        made_by(torch.bmm, factor("self", 0), factor("mat2", 1)), reads="self"
    ),
    # [Note: fused attention]
    "ScaledDotProductFlashAttentionBackward0": _expensive(
        attention_recipe(attend_flash), result="output"
    ),
    "ScaledDotProductCudnnAttentionBackward0": _expensive(
        attention_recipe(attend_cudnn, "attn_bias"), result="output"
    ),
    "ScaledDotProductEfficientAttentionBackward0": _expensive(
        attention_recipe(attend_efficient, "attn_bias"), result="output"
    ),
    "ScaledDotProductFlashAttentionForCpuBackward0": _expensive(
        attention_recipe(attend_on_cpu, "attn_mask"), result="output"
    ),
}
"""All that come with ssdtrain."""

REGISTERED: dict[str, RecipeBuilder] = {}
"""A user's own, of the process: a decorator has to write somewhere. Every session
copies them when it is opened."""


def recipe(*names: str) -> Callable[[RecipeFunction], RecipeFunction]:
    """Register a recipe for all sessions opened from now on (see docs/recipes.md).

    Args:
        names: of the nodes that make the tensor.

    Raises:
        ValueError: a name is taken, or none was given.
    """
    if not names:
        raise ValueError(
            "recipe() expects the name of at least one node, such as "
            "'GeluBackward0'; `tensor.grad_fn.name()` tells it."
        )

    def add(function: RecipeFunction) -> RecipeFunction:
        for name in names:
            if name in REGISTERED:
                raise ValueError(
                    f"a recipe for {name!r} is registered already; remove it with "
                    f"`del ssdtrain.rebuild.recipes.REGISTERED[{name!r}]` before "
                    "registering another."
                )
            REGISTERED[name] = function
        return function

    return add


def rules_of(*, weighed: bool) -> OpRules:
    """What a session knows of operators.

    Args:
        weighed: whether a plan weighs what recipes cost.
    """
    found = {
        name: each if weighed or not each.is_expensive else each._replace(recipe=None)
        for name, each in RULES.items()
    }
    for name, function in REGISTERED.items():
        found[name] = found.get(name, OpRule())._replace(recipe=function)
    return found
