"""From a node of an execution graph to the calls that kernel models price, by name. An
operator without a model is priced as a copy of its bytes (`Lowered.is_generic`)."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ssdtrain.tools.foresight import calls
from ssdtrain.tools.foresight.call import ELEMENT_BYTES, Call
from ssdtrain.tools.foresight.graph import Graph, Node, TensorInfo
from ssdtrain.tools.foresight.reuse import distinct_share

T = TypeVar("T")
FLOATS = ("bf16", "fp16", "fp32")


def _by_name(groups: Mapping[T, str]) -> dict[str, T]:
    """What operators share, by each one's name."""
    return {name: shared for shared, names in groups.items() for name in names.split()}


# Element-wise operators by the variant whose arithmetic they share.
POINTWISE: Mapping[str, str] = _by_name(
    {
        "add": "add add_ sub rsub",
        "mul": "div div_ mul mul_",
        "scale": "neg abs sqrt rsqrt",
        "square": "pow",
        "tanh": "exp log cos sin sigmoid sigmoid_ tanh tanh_ erf",
        "tanh_backward": "tanh_backward sigmoid_backward",
        "relu": "relu relu_",
        "relu_backward": "threshold_backward",
        "where": "addcmul where masked_fill masked_fill_",
        "copy": "eq ne lt le gt ge cumsum constant_pad_nd copy_",
        "dropout": "native_dropout",
        "dropout_backward": "native_dropout_backward",
        "cat": "cat stack",
        **{name: name for name in ("gelu", "gelu_backward", "silu", "silu_backward")},
    }
)
FILLS = (
    *("zeros", "zeros_like", "zero_", "ones", "ones_like", "full", "full_like"),
    *("fill_", "new_zeros", "new_ones", "arange", "scalar_tensor"),
)
NORMS: Mapping[str, str] = {
    "native_layer_norm": "layer_norm",
    "native_layer_norm_backward": "layer_norm_backward",
    "_fused_rms_norm": "rms_norm",
    "_fused_rms_norm_backward": "rms_norm_backward",
    "_softmax": "softmax",
    "_safe_softmax": "softmax",
    "_softmax_backward_data": "softmax_backward",
    "_log_softmax": "log_softmax",
    "_log_softmax_backward_data": "log_softmax_backward",
}
FUSED = ("inductor::", "_foreach_")
"""Several element-wise operators in one kernel: what they read and write counts."""
NOTHING = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """The calls of one node."""

    calls: tuple[Call, ...]
    is_generic: bool = False
    """No model knows the operator: its bytes are priced as a copy."""


@dataclass(frozen=True)
class _Site:
    """A node with its tensors."""

    node: Node
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]

    @property
    def read_bytes(self) -> int:
        return sum(t.num_bytes for t in self.inputs)

    @property
    def written_bytes(self) -> int:
        return sum(t.num_bytes for t in self.outputs)


def lower(graph: Graph, node: Node) -> Lowered:
    """What the device runs for a node; nothing for views and other streams' copies."""
    if node.is_view or "num_bytes" in node.attr:
        return Lowered(calls=())
    site = _Site(
        node,
        tuple(graph.tensors[n] for n in node.inputs),
        tuple(graph.tensors[n] for n in node.outputs),
    )
    name = node.name.removeprefix("aten::")
    if name in NOTHING or not any(t.elements for t in site.outputs):
        return Lowered(calls=())
    if not all(t.elements for t in site.inputs):  # of sums over nothing: zeros
        return Lowered(calls=(_memory(site, "fill"),))
    special = _SPECIAL.get(name)
    if special is not None:
        return Lowered(calls=tuple(special(site)))
    if name in NORMS:
        return Lowered(calls=(_norm(site, NORMS[name]),))
    if name in POINTWISE:
        return Lowered(calls=(_memory(site, _variant(site, POINTWISE[name])),))
    known = "fill" if name in FILLS else "add" if name.startswith(FUSED) else None
    found = _memory(site, known or "copy")
    return Lowered(calls=(found,), is_generic=known is None and name != "gather")


def is_pointwise(node: Node) -> bool:
    """Whether a node computes every element of its result from one of each input."""
    name = node.name.removeprefix("aten::")
    own = name in POINTWISE or name in FILLS or name in ("_to_copy", "clone")
    return (own and name not in ("cat", "stack", "cumsum")) and not node.is_view


def _variant(site: _Site, variant: str) -> str:
    """Binary operators with a number are unary ones."""
    if variant in ("add", "mul"):
        return _binary(site, variant)
    if variant == "copy" and site.outputs[0].dtype != site.inputs[-1].dtype:
        return _cast(site)
    return variant


def _binary(site: _Site, variant: str) -> str:
    """With a number, with a row or a column, or with an operand laid out otherwise."""
    if len(site.inputs) == 1:
        return "scale"
    shape, dense = site.outputs[0].shape, site.outputs[0].stride
    for tensor in site.inputs[:2]:
        if tensor.elements == 1 < site.outputs[0].elements:
            return "scale"
        if tensor.elements < site.outputs[0].elements:
            same_end = tensor.shape[-1:] == shape[-1:]
            rows = same_end and all(size == 1 for size in tensor.shape[:-1])
            if rows:
                return "mul_rows"
            return "mul_strided" if same_end else "mul_columns"
        if tensor.stride != dense and tensor.shape == shape:
            return "mul_strided"
    return variant


def _dtype(tensors: Sequence[TensorInfo]) -> str:
    """Of the first floating-point tensor; other types go by their width."""
    for tensor in tensors:
        if tensor.dtype in FLOATS:
            return tensor.dtype
    width = ELEMENT_BYTES[tensors[0].dtype] if tensors else 4
    return "bf16" if width <= 2 else "fp32"


def _grid(tensor: TensorInfo) -> tuple[int, int]:
    columns = tensor.shape[-1] if tensor.shape else 1
    return max(1, tensor.elements // max(1, columns)), max(1, columns)


def _pass(variant: str, tensor: TensorInfo, dtype: str, *, warm: bool = False) -> Call:
    """One pass over a tensor."""
    rows, columns = _grid(tensor)
    return calls.memory(variant, rows=rows, columns=columns, dtype=dtype, warm=warm)


def _memory(site: _Site, variant: str) -> Call:
    largest = max((*site.outputs, *site.inputs), key=lambda t: t.elements)
    call = _pass(variant, largest, _dtype((*site.outputs, *site.inputs)))
    read = 0 if variant == "fill" else site.read_bytes
    return replace(call, read_bytes=read, written_bytes=site.written_bytes)


def _cast(site: _Site) -> str:
    before = ELEMENT_BYTES[site.inputs[-1].dtype]
    after = ELEMENT_BYTES[site.outputs[0].dtype]
    return "copy" if before == after else "cast_up" if before < after else "cast_down"


def _copy(site: _Site) -> list[Call]:
    source, target = site.inputs[0], site.outputs[0]
    if source.dtype != target.dtype:
        return [_memory(site, _cast(site))]
    same = source.stride == target.stride
    return [_memory(site, "copy" if same else "permute")]


def _packed(site: _Site) -> list[Call]:
    """What was not named among the inputs (a rank's shards) is read, too."""
    call = _memory(site, "copy")
    return [replace(call, read_bytes=max(call.read_bytes, call.written_bytes))]


def _reduction(site: _Site) -> list[Call]:
    source = site.inputs[0]
    dims = site.node.attr.get("dim")
    rank = max(1, len(source.shape))
    if isinstance(dims, int):
        dims = [dims]
    wanted = sorted(d % rank for d in dims) if dims else list(range(rank))
    kept = [size for d, size in enumerate(source.shape) if d not in wanted]
    count = math.prod(kept)
    if count <= 1:
        return [_reduced(site, "sum_all", 1, source.elements)]
    if wanted[-1] == rank - 1:
        return [_reduced(site, "sum_columns", count, source.elements // count)]
    return [_reduced(site, "sum_rows", source.elements // count, count)]


def _reduced(site: _Site, variant: str, rows: int, columns: int) -> Call:
    call = calls.memory(variant, rows=rows, columns=columns, dtype=_dtype(site.inputs))
    return replace(call, read_bytes=site.read_bytes, written_bytes=site.written_bytes)


def _letter(tensor: TensorInfo) -> str:
    """`t` where the operand's rows, not its columns, lie side by side."""
    step_row, step_column = tensor.stride[-2:]
    return "t" if step_row == 1 and step_column != 1 else "n"


def _product(site: _Site) -> list[Call]:
    a, b = site.inputs[-2:]
    (m, k), n = a.shape[-2:], b.shape[-1]
    batch = a.shape[0] if len(a.shape) == 3 else 1
    dtype, layout, bias = _dtype((a,)), _letter(a) + _letter(b), len(site.inputs) == 3
    return [calls.product(m, n, k, batch, dtype=dtype, layout=layout, bias=bias)]


def _grouped_product(site: _Site) -> list[Call]:
    """Experts' products, of as many tokens each: which expert gets how many is data."""
    a, b = site.inputs[:2]
    if len(b.shape) == 3:  # tokens by experts' weights
        batch, (m, k), n = b.shape[0], a.shape[-2:], b.shape[-1]
        m = m if len(a.shape) == 3 else m // batch
    elif len(a.shape) == 3:
        batch, (m, k), n = a.shape[0], a.shape[-2:], b.shape[-1] // a.shape[0]
    else:  # a weight's gradient: the tokens are summed over
        batch = site.inputs[2].elements
        m, k, n = a.shape[0], a.shape[1] // batch, b.shape[1]
    m, n, k, batch = (max(1, size) for size in (m, n, k, batch))
    dtype, layout = _dtype((a,)), _letter(a) + _letter(b)
    return [calls.product(m, n, k, batch, dtype=dtype, layout=layout)]


def _attention(site: _Site) -> list[Call]:
    backward = site.node.name.endswith("_backward")
    query, key = site.inputs[1:3] if backward else site.inputs[:2]
    batch, heads, queries, head_dim = query.shape
    return [
        calls.attention(
            backward=backward,
            batch=batch,
            heads=heads,
            kv_heads=key.shape[1],
            queries=queries,
            keys=key.shape[2],
            head_dim=head_dim,
            causal=bool(site.node.attr.get("is_causal", False)),
            dropout=float(site.node.attr.get("dropout_p", 0.0)) > 0.0,
            dtype=_dtype((query,)),
        )
    ]


def _norm(site: _Site, variant: str) -> Call:
    rows, columns = _grid(site.inputs[0])
    if variant.endswith("softmax"):
        dim = site.node.attr.get("dim", -1)
        if isinstance(dim, int) and site.inputs[0].shape:
            columns = site.inputs[0].shape[dim]
            rows = site.inputs[0].elements // max(1, columns)
    return calls.norm(variant, rows=rows, columns=columns, dtype=_dtype(site.inputs))


def _group_norm(site: _Site) -> list[Call]:
    """A row is a group of channels of one sample."""
    backward = site.node.name.endswith("_backward")
    variant = "layer_norm_backward" if backward else "layer_norm"
    x, attr = site.inputs[0], site.node.attr
    rows = max(1, x.shape[0] * int(attr.get("group", 1)))
    columns = max(1, x.elements // rows)
    return [calls.norm(variant, rows=rows, columns=columns, dtype=_dtype((x,)))]


def distinct(rows: float, table_rows: float) -> float:
    """Expected number of different rows among `rows` uniform draws."""
    if table_rows <= 0:
        return 0.0
    return -table_rows * math.expm1(rows * math.log1p(-1.0 / max(2.0, table_rows)))


def _rows_moved(site: _Site, variant: str, table: TensorInfo, rows: int) -> Call:
    """Without data, rows are taken as drawn uniformly; `attr` may know better."""
    table_rows, columns = table.shape[0], max(1, table.elements // table.shape[0])
    known = site.node.attr.get("distinct_rows")
    factors = site.node.attr.get("reuse_factors")
    if known is None and factors is not None:
        known = max(1.0, rows * distinct_share(factors))
    found = distinct(rows, table_rows) if known is None else float(known)
    return calls.lookup(
        variant,
        rows=rows,
        columns=columns,
        table_rows=table_rows,
        distinct_rows=found,
        dtype=_dtype((table,)),
    )


def _lookup(site: _Site) -> list[Call]:
    table, index = site.inputs[0], site.inputs[-1]
    return [_rows_moved(site, "lookup", table, index.elements)]


def _lookup_backward(site: _Site) -> list[Call]:
    index, table = site.inputs[1], site.outputs[0]
    return [_rows_moved(site, "lookup_backward", table, index.elements)]


def _into_copy(site: _Site, added: Call) -> list[Call]:
    """What is added to a table in place, or to a copy of it."""
    table = replace(site, outputs=site.inputs[:1], inputs=site.inputs[:1])
    return [*([] if site.node.name.endswith("_") else [_memory(table, "copy")]), added]


def _bag(site: _Site) -> list[Call]:
    """Rows are read, and added up before one a bag is written."""
    table, index = site.inputs[0], site.inputs[1]
    rows = _rows_moved(site, "lookup", table, index.elements)
    return [replace(rows, written_bytes=site.outputs[0].num_bytes)]


def _index_add(site: _Site) -> list[Call]:
    table, index = site.inputs[0], site.inputs[1]
    return _into_copy(site, _rows_moved(site, "scatter_add", table, index.elements))


def _index(site: _Site) -> list[Call]:
    """`x[rows]` moves rows; with more indices, elements."""
    source, out = site.inputs[0], site.outputs[0]
    if len(site.inputs) == 2:
        return [_rows_moved(site, "lookup", source, site.inputs[1].elements)]
    return [_pass("permute", out, _dtype((out,)))]


def _index_put(site: _Site) -> list[Call]:
    """Added where the indices say; with several indices, elements or slices."""
    table, values = site.inputs[0], site.inputs[-1]
    if not values.shape:  # one number, where a mask says
        return [_memory(site, "where")]
    rows = max(1, *(index.elements for index in site.inputs[1:-1]), 1)
    columns = max(1, values.elements // rows)
    table_rows = max(1, table.elements // columns)
    added = calls.lookup(
        "scatter_add",
        rows=rows,
        columns=columns,
        table_rows=table_rows,
        distinct_rows=distinct(rows, table_rows),
        dtype=_dtype((table,)),
    )
    return _into_copy(site, added)


def _part_backward(site: _Site) -> list[Call]:
    """Zeros of the whole, then a copy into a part."""
    whole = _pass("fill", site.outputs[0], _dtype(site.outputs))
    return [whole, _pass("copy", site.inputs[0], _dtype(site.inputs), warm=True)]


def _convolution(site: _Site) -> list[Call]:
    backward = site.node.name.endswith("_backward")
    x, weight = site.inputs[1:3] if backward else site.inputs[:2]
    attr = site.node.attr
    mask = attr.get("output_mask", [True, True, False])
    if len(weight.shape) == 3:
        return _line_convolution(site, weight, mask)
    found = calls.convolution(
        backward=backward,
        batch=x.shape[0],
        channels=x.shape[1],
        side=x.shape[-1],
        filters=weight.shape[0],
        kernel=weight.shape[-1],
        stride=int(attr.get("stride", [1])[0]),
        dtype=_dtype((x,)),
        input_gradient=bool(mask[0]),
    )
    bias = site.outputs[-1]
    if backward and len(mask) > 2 and mask[2] and len(bias.shape) == 1:
        rows, columns = site.inputs[0].elements // bias.elements, bias.elements
        dtype = _dtype((bias,))
        total = calls.memory("sum_rows", rows=rows, columns=columns, dtype=dtype)
        return [found, total]
    if not backward and len(site.inputs) == 3:
        return [found, _pass("scale", site.outputs[0], _dtype(site.outputs), warm=True)]
    return [found]


def _line_convolution(
    site: _Site, weight: TensorInfo, mask: Sequence[bool]
) -> list[Call]:
    """A 1-d convolution, as the products that it is."""
    backward = site.node.name.endswith("_backward")
    out = site.inputs[0] if backward else site.outputs[0]
    filters, dtype = weight.shape[0], _dtype((weight,))
    rows, inner = out.elements // filters, weight.elements // filters
    if not backward:
        return [calls.product(m=rows, n=filters, k=inner, dtype=dtype)]
    by_weight = calls.product(m=filters, n=inner, k=rows, dtype=dtype)
    by_input = calls.product(m=rows, n=inner, k=filters, dtype=dtype)
    return [by_weight, by_input] if mask[0] else [by_weight]


def _cross_entropy(site: _Site) -> list[Call]:
    """Element-wise losses: some passes over the logits."""
    return [_pass("mul", site.inputs[0], _dtype(site.inputs), warm=True)] * 4


def _nll_backward(site: _Site) -> list[Call]:
    """Zeros of the logits' gradient, and one element a row."""
    out, dtype = site.outputs[0], _dtype(site.outputs[:1])
    few = calls.memory("scale", rows=_grid(out)[0], columns=1, dtype=dtype)
    return [_pass("fill", out, dtype), few]


def _nll(site: _Site) -> list[Call]:
    rows, _columns = _grid(site.inputs[0])
    dtype = _dtype(site.inputs)
    return [calls.memory("sum_all", rows=1, columns=rows, dtype=dtype)]


def _optimizer(site: _Site) -> list[Call]:
    """The inputs come in tuples of equal size: parameters, gradients, states."""
    attr, dtype = site.node.attr, _dtype(site.inputs)
    variant, shards = str(attr.get("optimizer", "adamw")), int(attr.get("shards", 1))
    reads, _writes = calls.OPTIMIZERS[variant]
    elements = max(1, int(sum(t.elements for t in site.inputs) // reads // shards))
    tensors = int(attr.get("tensors", 1))
    return [calls.optimizer(variant, elements=elements, tensors=tensors, dtype=dtype)]


ATTENTIONS = ("flash_attention", "efficient_attention", "flash_attention_for_cpu")
_SPECIAL: Mapping[str, Callable[[_Site], Sequence[Call]]] = _by_name(
    {
        _product: "mm addmm bmm baddbmm",
        _grouped_product: "_grouped_mm",
        _group_norm: "native_group_norm native_group_norm_backward",
        _attention: " ".join(
            f"_scaled_dot_product_{kernel}{way}"
            for kernel in ATTENTIONS
            for way in ("", "_backward")
        ),
        _copy: "_to_copy clone contiguous",
        _packed: "fsdp::all_gather_copy_in fsdp::split_with_sizes_copy fsdp::chunk_cat",
        _reduction: "sum mean amax all",
        _lookup: "embedding index_select",
        _bag: "_embedding_bag _embedding_bag_forward_only",
        _lookup_backward: "_embedding_bag_dense_backward embedding_dense_backward",
        _index: "index",
        _index_put: "index_put index_put_ _index_put_impl_",
        _index_add: "index_add index_add_",
        _part_backward: "slice_backward select_backward",
        _convolution: "convolution convolution_backward",
        _nll: "nll_loss_forward",
        _nll_backward: "nll_loss_backward",
        _cross_entropy: "binary_cross_entropy_with_logits",
        _optimizer: "_fused_adamw_ _fused_sgd_",
    }
)
