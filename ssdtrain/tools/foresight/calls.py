"""Makes calls from sizes: FLOPs and bytes of every operator that has a kernel model."""

from dataclasses import replace

from ssdtrain.tools.foresight.call import ELEMENT_BYTES, Call, KernelFamily

# Tensors an element-wise operator reads and writes, in elements of its own type, and
# bytes an element beside them (a dropout mask). `mul_strided` has an operand whose
# rows lie otherwise, `mul_rows` one that is one row, `mul_columns` one column.
POINTWISE: dict[str, tuple[float, float, float]] = {
    "fill": (0, 1, 0),
    **dict.fromkeys("copy scale relu gelu silu tanh square".split(), (1, 1, 0)),
    **dict.fromkeys("permute mul_rows mul_columns cat".split(), (1, 1, 0)),
    **dict.fromkeys("add mul mul_strided relu_backward".split(), (2, 1, 0)),
    **dict.fromkeys("gelu_backward silu_backward tanh_backward".split(), (2, 1, 0)),
    "where": (2, 1, 1),
    **dict.fromkeys("dropout dropout_backward".split(), (1, 1, 1)),
}
REDUCTIONS = ("sum_rows", "sum_columns", "sum_all")
CASTS = ("cast_up", "cast_down")
NORMS: dict[str, tuple[float, float]] = {
    f"{name}{way}": (reads, 1)
    for name in ("layer_norm", "rms_norm", "softmax", "log_softmax")
    for way, reads in (("", 1), ("_backward", 2))
}
LOOKUPS = ("lookup", "lookup_backward", "scatter_add")
# Bytes a parameter of the fused optimizers: reads and writes, in its own type.
OPTIMIZERS: dict[str, tuple[float, float]] = {
    "adamw": (4, 3),
    "sgd": (2, 1),
    "sgd_momentum": (3, 2),
}


def product(
    m: int,
    n: int,
    k: int,
    batch: int = 1,
    *,
    dtype: str,
    layout: str = "nt",
    bias: bool = False,
    warm: bool = False,
) -> Call:
    """(m, k) by (k, n), `batch` times; `t` in `layout`: stored transposed."""
    size = ELEMENT_BYTES[dtype]
    read = size * batch * (m * k + k * n) + (size * n if bias else 0)
    sizes = {"batch": batch, "m": m, "n": n, "k": k, "bias": float(bias)}
    flops, written = 2.0 * batch * m * n * k, size * batch * m * n
    made = _call(KernelFamily.PRODUCT, layout, dtype, sizes, read, written, warm=warm)
    return replace(made, flops=flops)


def _call(
    family: KernelFamily,
    variant: str,
    dtype: str,
    sizes: dict[str, float],
    read: float,
    written: float,
    *,
    warm: bool = False,
) -> Call:
    return Call(
        family=family,
        variant=variant,
        dtype=dtype,
        sizes=sizes,
        read_bytes=read,
        written_bytes=written,
        warm_bytes=read if warm else 0.0,
    )


def attention(
    *,
    backward: bool,
    batch: int,
    heads: int,
    kv_heads: int,
    queries: int,
    keys: int,
    head_dim: int,
    causal: bool,
    dropout: bool = False,
    dtype: str = "bf16",
) -> Call:
    """Scaled dot-product attention without an explicit mask."""
    size = ELEMENT_BYTES[dtype]
    full = 4.0 * batch * heads * queries * keys * head_dim
    if causal:
        full *= 0.5
    wide = batch * heads * queries * head_dim * size
    kv = 2 * batch * kv_heads * keys * head_dim * size
    lse = 4 * batch * heads * queries
    read, written = wide + kv, wide + lse
    if backward:
        read, written = 3 * wide + kv + lse, wide + kv
    sizes = {
        **{"batch": batch, "heads": heads, "kv_heads": kv_heads},
        **{"queries": queries, "keys": keys, "head_dim": head_dim},
        **{"causal": float(causal), "dropout": float(dropout)},
    }
    variant = "backward" if backward else "forward"
    made = _call(KernelFamily.ATTENTION, variant, dtype, sizes, read, written)
    return replace(made, flops=2.5 * full if backward else full)


def norm(
    variant: str, *, rows: int, columns: int, dtype: str, warm: bool = False
) -> Call:
    """A normalization of rows, or its backward."""
    reads, writes = NORMS[variant]
    num_bytes = ELEMENT_BYTES[dtype] * rows * columns
    sizes: dict[str, float] = {"rows": rows, "columns": columns}
    moved = reads * num_bytes, writes * num_bytes
    return _call(KernelFamily.NORM, variant, dtype, sizes, *moved, warm=warm)


def memory(
    variant: str, *, rows: int, columns: int, dtype: str, warm: bool = False
) -> Call:
    """An element-wise operator, a cast or a reduction over (rows, columns)."""
    size, count = ELEMENT_BYTES[dtype], float(rows) * columns
    if variant in POINTWISE:
        reads, writes, beside = POINTWISE[variant]
        read, written = reads * size * count, writes * size * count
        if variant == "dropout":
            written += beside * count
        else:
            read += beside * count
    elif variant == "cast_up":
        read, written = 2 * count, 4 * count
    elif variant == "cast_down":
        read, written = 4 * count, 2 * count
    else:
        kept = {"sum_rows": columns, "sum_columns": rows, "sum_all": 1}[variant]
        read, written = size * count, float(size * kept)
    sizes: dict[str, float] = {"rows": rows, "columns": columns}
    return _call(KernelFamily.MEMORY, variant, dtype, sizes, read, written, warm=warm)


def lookup(
    variant: str,
    *,
    rows: int,
    columns: int,
    table_rows: int,
    distinct_rows: float,
    dtype: str,
) -> Call:
    """`rows` rows of `columns` read from a table (or added to it), of which
    `distinct_rows` are different ones."""
    size = ELEMENT_BYTES[dtype]
    moved = float(size) * rows * columns
    distinct = float(size) * distinct_rows * columns
    table = float(size) * table_rows * columns
    index = 8.0 * rows
    if variant == "lookup":
        read, written, warm = moved + index, moved, moved - distinct
    elif variant == "lookup_backward":  # a dense gradient, zeroed first
        read, written, warm = moved + index, table + distinct, 0.0
    else:
        read, written, warm = moved + index + distinct, moved, moved - distinct
    sizes: dict[str, float] = {"rows": rows, "columns": columns}
    sizes |= {"table_rows": table_rows, "distinct_rows": distinct_rows}
    made = _call(KernelFamily.LOOKUP, variant, dtype, sizes, read, written)
    return replace(made, warm_bytes=max(0.0, warm))


def convolution(
    *,
    backward: bool,
    batch: int,
    channels: int,
    side: int,
    filters: int,
    kernel: int,
    stride: int,
    dtype: str,
    input_gradient: bool = True,
) -> Call:
    """A square 2-d convolution, padded by half its kernel if that overlaps."""
    padding = 0 if stride == kernel else kernel // 2
    out = (side + 2 * padding - kernel) // stride + 1
    size = ELEMENT_BYTES[dtype]
    read_in = size * batch * channels * side * side
    weights = size * filters * channels * kernel * kernel
    made = size * batch * filters * out * out
    flops = 2.0 * batch * filters * out * out * channels * kernel * kernel
    read, written = read_in + weights, made
    if backward:
        passes = 2 if input_gradient else 1
        flops *= passes
        read = passes * made + read_in + (weights if input_gradient else 0)
        written = weights + (read_in if input_gradient else 0)
    sizes = {
        **{"batch": batch, "channels": channels, "side": side, "filters": filters},
        **{"kernel": kernel, "stride": stride},
        "input_gradient": float(input_gradient),
    }
    variant = "backward" if backward else "forward"
    call = _call(KernelFamily.CONVOLUTION, variant, dtype, sizes, read, written)
    return replace(call, flops=flops)


def optimizer(variant: str, *, elements: int, tensors: int, dtype: str) -> Call:
    """A fused optimizer's update of `tensors` parameters, `elements` together."""
    num_bytes = ELEMENT_BYTES[dtype] * elements
    moved = (ways * num_bytes for ways in OPTIMIZERS[variant])
    sizes: dict[str, float] = {"elements": elements, "tensors": tensors}
    return _call(KernelFamily.OPTIMIZER, variant, dtype, sizes, *moved)
