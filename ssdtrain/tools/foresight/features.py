"""What a kernel model looks at, a row of numbers for each call: logarithms of sizes,
how full the last wave of tiles is, how sizes are aligned."""

import math
from collections.abc import Callable, Mapping, Sequence

from ssdtrain.tools.foresight import calls
from ssdtrain.tools.foresight.call import ELEMENT_BYTES, Call, KernelFamily
from ssdtrain.tools.foresight.spec import DeviceSpec

TILES = ((128, 256), (128, 128), (64, 64), (256, 128))
MAX_ALIGNMENT = 7
LAYOUTS = ("nn", "nt", "tn", "tt")


def row_of(call: Call, spec: DeviceSpec, law_us: float) -> list[float]:
    """The features of a call, in the order of `feature_names`; `law_us`: of the closed
    form, or the roofline."""
    law = [_log(16.0 * law_us), math.log2(law_us / spec.roofline_us(call))]
    return [*_common(call, spec), *law, *_OWN[call.family](call, spec)]


def feature_names(family: KernelFamily) -> tuple[str, ...]:
    """Names of a family's features."""
    common = ("roofline", "flops", "read", "written", "warm", "element_bytes")
    return (*common, "law", "law_over_roofline", *_NAMES[family])


def _log(value: float) -> float:
    return math.log2(value) if value > 1.0 else 0.0


def _common(call: Call, spec: DeviceSpec) -> list[float]:
    return [
        _log(16.0 * spec.roofline_us(call)),
        _log(call.flops),
        _log(call.read_bytes),
        _log(call.written_bytes),
        call.warm_bytes / call.read_bytes if call.read_bytes else 0.0,
        float(ELEMENT_BYTES[call.dtype]),
    ]


def alignment(value: float) -> float:
    """log2 of the largest power of two that divides a size."""
    whole = int(value)
    return float(min(MAX_ALIGNMENT, (whole & -whole).bit_length() - 1) if whole else 0)


def waves(tiles: float, spec: DeviceSpec) -> tuple[float, float]:
    """(log2 of the waves, share of the slots that the waves fill)."""
    full = tiles / spec.num_sms
    return _log(1.0 + full), full / math.ceil(full) if full > 0 else 0.0


def _product(call: Call, spec: DeviceSpec) -> list[float]:
    s = call.sizes
    batch, m, n, k = s["batch"], s["m"], s["n"], s["k"]
    found = [_log(batch), _log(m), _log(n), _log(k), s["bias"]]
    found += [alignment(m), alignment(n), alignment(k)]
    first, second = call.variant[0], call.variant[1]
    found += [alignment(k if first == "n" else m), alignment(n if second == "n" else k)]
    found += [float(LAYOUTS.index(call.variant))]
    for height, width in TILES:
        down, across = math.ceil(m / height), math.ceil(n / width)
        number, fill = waves(batch * down * across, spec)
        used = m * n / (down * height * across * width)
        found += [number, fill, used]
    found += [_log(m) - _log(n), _log(k) - _log(min(m, n))]
    return found


def _attention(call: Call, spec: DeviceSpec) -> list[float]:
    s = call.sizes
    blocks = s["batch"] * s["heads"] * math.ceil(s["queries"] / 128)
    number, fill = waves(blocks, spec)
    queries = s["queries"]
    found = [float(call.variant == "backward"), _log(s["batch"] * s["heads"])]
    found += [_log(s["heads"] / s["kv_heads"]), _log(queries), _log(s["keys"])]
    found += [s["head_dim"], s["causal"], s["dropout"], number, fill]
    return [*found, alignment(queries), queries / (128 * math.ceil(queries / 128))]


def _one_hot(value: str, among: Sequence[str]) -> list[float]:
    return [float(value == one) for one in among]


def _grid(call: Call, among: Sequence[str]) -> list[float]:
    rows, columns = call.sizes["rows"], call.sizes["columns"]
    one_hot = _one_hot(call.variant, among)
    return [_log(rows), _log(columns), alignment(columns), *one_hot]


MEMORY = (*sorted(calls.POINTWISE), *calls.REDUCTIONS, *calls.CASTS)
NORMS = tuple(sorted(calls.NORMS))


def _lookup(call: Call, spec: DeviceSpec) -> list[float]:
    s = call.sizes
    size = ELEMENT_BYTES[call.dtype]
    different = s["distinct_rows"]
    return [
        _log(s["rows"]),
        _log(s["columns"]),
        _log(s["table_rows"]),
        different / s["rows"] if s["rows"] else 0.0,
        _log(different * s["columns"] * size),
        _log(s["table_rows"] * s["columns"] * size),
        _log(s["columns"] * size),
        *_one_hot(call.variant, calls.LOOKUPS),
    ]


def _convolution(call: Call, spec: DeviceSpec) -> list[float]:
    s = call.sizes
    out = s["side"] / s["stride"]
    number, fill = waves(
        math.ceil(s["batch"] * out * out / 128) * math.ceil(s["filters"] / 128), spec
    )
    logs = [_log(s[name]) for name in ("batch", "channels", "side", "filters")]
    found = [float(call.variant == "backward"), *logs, s["kernel"], s["stride"]]
    return [*found, s["input_gradient"], alignment(s["channels"]), number, fill]


def _optimizer(call: Call, spec: DeviceSpec) -> list[float]:
    elements, tensors = call.sizes["elements"], call.sizes["tensors"]
    logs = [_log(elements), _log(tensors), _log(elements / tensors)]
    return [*logs, *_one_hot(call.variant, tuple(sorted(calls.OPTIMIZERS)))]


_OWN: Mapping[KernelFamily, Callable[[Call, DeviceSpec], list[float]]] = {
    KernelFamily.PRODUCT: _product,
    KernelFamily.ATTENTION: _attention,
    KernelFamily.NORM: lambda call, spec: _grid(call, NORMS),
    KernelFamily.MEMORY: lambda call, spec: _grid(call, MEMORY),
    KernelFamily.LOOKUP: _lookup,
    KernelFamily.CONVOLUTION: _convolution,
    KernelFamily.OPTIMIZER: _optimizer,
}
_GRID_NAMES = ("rows", "columns", "column_alignment")
_NAMES: Mapping[KernelFamily, tuple[str, ...]] = {
    KernelFamily.PRODUCT: (
        *("batch", "m", "n", "k", "bias", "m_alignment", "n_alignment"),
        *("k_alignment", "first_alignment", "second_alignment", "layout"),
        *(f"{what}_{h}x{w}" for h, w in TILES for what in ("waves", "fill", "used")),
        *("m_over_n", "k_over_least"),
    ),
    KernelFamily.ATTENTION: (
        *("backward", "heads", "group", "queries", "keys", "head_dim", "causal"),
        *("dropout", "waves", "fill", "query_alignment", "used"),
    ),
    KernelFamily.NORM: (*_GRID_NAMES, *NORMS),
    KernelFamily.MEMORY: (*_GRID_NAMES, *MEMORY),
    KernelFamily.LOOKUP: (
        *("rows", "columns", "table_rows", "distinct", "distinct_bytes"),
        *("table_bytes", "row_bytes", *calls.LOOKUPS),
    ),
    KernelFamily.CONVOLUTION: (
        *("backward", "batch", "channels", "side", "filters", "kernel", "stride"),
        *("input_gradient", "channel_alignment", "waves", "fill"),
    ),
    KernelFamily.OPTIMIZER: (
        *("elements", "tensors", "elements_a_tensor"),
        *sorted(calls.OPTIMIZERS),
    ),
}
