"""Closed forms of kernels that move bytes: element-wise operators, normalizations,
lookups and optimizers' updates.

[Note: what bounds a kernel that moves bytes]
Memory does where rows are long and many; elsewhere the multiprocessors, so that such
kernels take as long on an H200 as on an H100. A row of a normalization or a lookup is a
block, which costs its start; its elements cost arithmetic, more where rows cannot be
read in vectors. Gradients of a normalization's weight are sums over rows: up to
`SERIAL_ROWS`, torch walks down every column in one block. Up to `FEW_ROWS` indices it
adds an embedding's gradients row by row; more are sorted first. A fused optimizer takes
chunks of `CHUNK` elements, in launches of as many tensors as fit into a kernel's
arguments. Bytes that were touched before count as far as the cache holds them.
(tests/ssdtrain/tools/foresight/test_laws.py)
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ssdtrain.tools.foresight.call import ELEMENT_BYTES, Call, KernelFamily
from ssdtrain.tools.foresight.calls import LOOKUPS, OPTIMIZERS
from ssdtrain.tools.foresight.features import MEMORY, NORMS
from ssdtrain.tools.foresight.forms import (
    ClosedForm,
    Columns,
    Parameters,
    cached,
    constants,
    double_tensor,
    flags,
    longer,
    moved_us,
    sizes,
)
from ssdtrain.tools.foresight.spec import DeviceSpec

L2_TB_PER_S = 6.0
VECTOR = 4
"""Elements of a row that are read at once where its length allows it."""
SHORT_ROW = 1024
"""Up to here a warp, not a block, takes a row's softmax."""
SERIAL_ROWS = 64 * 1024
SUMMED = ("layer_norm_backward", "rms_norm_backward")
FEW_ROWS = 3072
VECTOR_BYTES = 16
CHUNK = 65536
MOST_CHUNKS = 320
"""Of a launch."""
MOST_TENSORS: Mapping[str, int] = {"adamw": 36, "sgd": 64, "sgd_momentum": 48}
"""Of a launch: with four, two and three addresses each."""
UPDATES = tuple(sorted(OPTIMIZERS))


def _common(calls: Sequence[Call], variants: Sequence[str]) -> Columns:
    return {
        "variant": double_tensor(
            [variants.index(call.variant) for call in calls]
        ).long(),
        "half": flags([ELEMENT_BYTES[call.dtype] < 4 for call in calls]).long(),
        "read": double_tensor([call.read_bytes - call.warm_bytes for call in calls]),
        "warm": double_tensor([call.warm_bytes for call in calls]),
        "written": double_tensor([call.written_bytes for call in calls]),
    }


def _constants(count: int) -> dict[str, Tensor]:
    """Of every form here."""
    return {
        "start": constants(count, 0.5),
        "memory": constants(count, 1.0),
        "half": constants(count, 0.0),
        "cache": constants(count, math.log(L2_TB_PER_S)),
        "room": constants(1, math.log(0.5)),
        "edge": constants(1, 0.0),
    }


def _traffic_us(x: Columns, p: Parameters, spec: DeviceSpec) -> Tensor:
    """Of memory and cache."""
    variant, again = x["variant"], x["warm"] + x["written"]
    inside = cached(x["read"] + again, p["room"], p["edge"], spec)
    share = p["memory"][variant] + p["half"][variant] * x["half"]
    cold = moved_us(x["read"] + again * (1 - inside), share, spec)
    return cold + again * inside / (torch.exp(p["cache"][variant]) * 1e6)


# -- element-wise operators and reductions --------------------------------------------


def _memory_columns(calls: Sequence[Call], spec: DeviceSpec) -> Columns:
    count = sizes(calls, "rows") * sizes(calls, "columns")
    return {**_common(calls, MEMORY), "elements": count}


def _memory_start() -> Parameters:
    count = len(MEMORY)
    return {**_constants(count), "element": constants(count, math.log(1e-7))}


def _memory(x: Columns, p: Parameters, spec: DeviceSpec) -> Tensor:
    variant = x["variant"]
    arithmetic = torch.exp(p["element"][variant]) * x["elements"]
    body = longer(_traffic_us(x, p, spec), arithmetic)
    return torch.log(torch.exp(p["start"][variant]) + body)


# -- normalizations -------------------------------------------------------------------


def _norm_columns(calls: Sequence[Call], spec: DeviceSpec) -> Columns:
    rows, columns = sizes(calls, "rows"), sizes(calls, "columns")
    summed = flags([call.variant in SUMMED for call in calls])
    return {
        **_common(calls, NORMS),
        "rows": rows,
        "columns": columns,
        "odd": (columns % VECTOR != 0).double(),
        "short": (columns <= SHORT_ROW).double(),
        "serial_rows": summed * (rows <= SERIAL_ROWS) * rows,
    }


def _norm_start() -> Parameters:
    """Of rows and elements: microseconds of a multiprocessor."""
    count = len(NORMS)
    return {
        **_constants(count),
        "row": constants(count, math.log(0.08)),
        "element": constants(count, math.log(1e-4), 2),
        "short": constants(count, 0.0),
        "odd": constants(count, 0.3),
        "serial": constants(count, math.log(3e-3)),
    }


def _norm(x: Columns, p: Parameters, spec: DeviceSpec) -> Tensor:
    variant = x["variant"]
    element = p["element"][variant, x["half"]] + p["short"][variant] * x["short"]
    row = torch.exp(p["row"][variant]) + x["columns"] * torch.exp(element)
    row = row * torch.exp(p["odd"][variant] * x["odd"])
    # Fewer rows than multiprocessors take as long as one.
    blocks = torch.clamp(x["rows"] / spec.num_sms, min=1.0) * row
    serial = torch.exp(p["serial"][variant]) * x["serial_rows"]
    body = longer(_traffic_us(x, p, spec), blocks)
    return torch.log(torch.exp(p["start"][variant]) + body + serial)


# -- lookups --------------------------------------------------------------------------

SORTED, SERIAL = LOOKUPS.index("lookup_backward"), len(LOOKUPS)
"""Ways of the same variant; the serial one is as if it were another variant."""


def _lookup_columns(calls: Sequence[Call], spec: DeviceSpec) -> Columns:
    common = dict(_common(calls, LOOKUPS))
    rows, columns = sizes(calls, "rows"), sizes(calls, "columns")
    size = double_tensor([float(ELEMENT_BYTES[call.dtype]) for call in calls])
    makes_table = (common["variant"] == SORTED).double()
    table = makes_table * sizes(calls, "table_rows") * columns * size
    few = (common["variant"] == SORTED) & (rows <= FEW_ROWS)
    common["variant"] = torch.where(few, SERIAL, common["variant"])
    common["written"] = common["written"] - table
    return {
        **common,
        "rows": rows,
        "elements": rows * columns,
        "table": table,
        "odd": (columns * size % VECTOR_BYTES != 0).double(),
        "again": torch.log(rows / torch.clamp(sizes(calls, "distinct_rows"), min=1.0)),
    }


def _lookup_start() -> Parameters:
    count = len(LOOKUPS) + 1
    return {
        **_constants(count),
        "start": double_tensor([0.8, 4.5, 0.9, 1.2]),
        "row": double_tensor([math.log(us) for us in (6e-4, 1e-3, 5e-4, 0.02)]),
        "element": constants(count, math.log(5e-6), 2),
        "odd": constants(count, 0.2),
        "again": constants(count, 0.0),
        "table": constants(1, 1.0),
    }


def _lookup(x: Columns, p: Parameters, spec: DeviceSpec) -> Tensor:
    variant = x["variant"]
    rows = torch.exp(p["row"][variant]) * x["rows"]
    # Additions at the same place wait for one another.
    slower = p["odd"][variant] * x["odd"] + p["again"][variant] * x["again"]
    element = torch.exp(p["element"][variant, x["half"]] + slower)
    body = longer(_traffic_us(x, p, spec), longer(rows, element * x["elements"]))
    zeros = moved_us(x["table"], p["table"], spec)
    return torch.log(torch.exp(p["start"][variant]) + body + zeros)


# -- optimizers -----------------------------------------------------------------------


def _optimizer_columns(calls: Sequence[Call], spec: DeviceSpec) -> Columns:
    launches = []
    for call in calls:
        tensors, elements = call.sizes["tensors"], call.sizes["elements"]
        chunks = tensors * math.ceil(elements / tensors / CHUNK)
        by_arguments = math.ceil(tensors / MOST_TENSORS[call.variant])
        launches.append(float(max(by_arguments, math.ceil(chunks / MOST_CHUNKS))))
    each = sizes(calls, "elements") / sizes(calls, "tensors")
    return {
        **_common(calls, UPDATES),
        "launches": double_tensor(launches),
        "chunk": torch.clamp(each, max=float(CHUNK)),
    }


def _optimizer_start() -> Parameters:
    count = len(UPDATES)
    return {
        "start": constants(count, 0.3),
        "launch": constants(count, 0.5),
        "memory": constants(count, 1.0),
        "half": constants(count, 0.0),
        "element": constants(count, math.log(4e-4), 2),
    }


def _optimizer(x: Columns, p: Parameters, spec: DeviceSpec) -> Tensor:
    variant, launches = x["variant"], x["launches"]
    share = p["memory"][variant] + p["half"][variant] * x["half"]
    moved = moved_us((x["read"] + x["written"]) / launches, share, spec)
    block = x["chunk"] * torch.exp(p["element"][variant, x["half"]])
    one = torch.exp(p["launch"][variant]) + longer(moved, block)
    return torch.log(torch.exp(p["start"][variant]) + launches * one)


FORMS: Mapping[KernelFamily, ClosedForm] = {
    KernelFamily.MEMORY: ClosedForm(_memory_columns, _memory_start, _memory),
    KernelFamily.NORM: ClosedForm(_norm_columns, _norm_start, _norm),
    KernelFamily.LOOKUP: ClosedForm(_lookup_columns, _lookup_start, _lookup),
    KernelFamily.OPTIMIZER: ClosedForm(
        _optimizer_columns, _optimizer_start, _optimizer
    ),
}
