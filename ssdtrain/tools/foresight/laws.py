"""Closed forms of kernels' times, whose few constants are found by gradient descent on
logarithms; what boosted trees then have to learn is small.

[Note: tiles and waves]
A product cuts its result into tiles; each multiprocessor works on one at a time, so
tiles run in waves. Which tile, and into how many parts the sum is split, the library
chooses: the fastest that a law knows. A tile takes its arithmetic, or the reading of
its operands, then its writing; the whole takes memory's time at least. Attention is
blocks of queries that pass over blocks of keys, up to the diagonal where it is causal.
Convolutions have a rate that goes with a power of each of their sizes.
(tests/ssdtrain/tools/foresight/test_laws.py)
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ssdtrain.tools.foresight.call import ELEMENT_BYTES, Call, KernelFamily
from ssdtrain.tools.foresight.features import LAYOUTS, alignment
from ssdtrain.tools.foresight.forms import (
    ClosedForm,
    Columns,
    Parameters,
    constants,
    double_tensor,
    flags,
    in_waves,
    longer,
    moved_us,
    sizes,
)
from ssdtrain.tools.foresight.spec import DeviceSpec
from ssdtrain.tools.foresight.traffic import FORMS

Times = Sequence[tuple[Call, float]]

NUM_STEPS, LATE_STEPS = 350, 110
RATE, LATE_RATE = 0.05, 0.015
KNEE = 0.1
"""Relative errors count squared up to here, and singly beyond."""

TILES = (
    *((64, 64), (128, 64), (64, 128), (128, 128), (128, 256)),
    *((256, 128), (64, 256), (32, 64), (256, 64)),
)
SPLITS = (1, 2, 3, 4, 6, 8, 16, 32)
SPREAD = 0.05
"""Logarithmic distance at which a slower way no longer counts."""
SPLIT_BYTES = 8.0
"""Written and read of a partial sum."""
BLOCK = 128
HEAD_DIMS = (32, 64, 128)
ALIGNED = 3.0
"""log2 of the elements after which alignment no longer matters."""


# -- products -------------------------------------------------------------------------

HEIGHTS = double_tensor([h for h, _ in TILES for _ in SPLITS])
WIDTHS = double_tensor([w for _, w in TILES for _ in SPLITS])
PARTS = double_tensor([s for _ in TILES for s in SPLITS])
TILE = double_tensor([float(at) for at, _ in enumerate(TILES) for _ in SPLITS]).long()


def _least_alignment(call: Call) -> float:
    """Of both operands' rows and of the result's."""
    s = call.sizes
    first = s["k"] if call.variant[0] == "n" else s["m"]
    second = s["n"] if call.variant[1] == "n" else s["k"]
    return min(ALIGNED, *(alignment(size) for size in (first, second, s["n"])))


def _product_columns(calls: Sequence[Call], spec: DeviceSpec) -> Columns:
    found = {name: sizes(calls, name) for name in ("batch", "m", "n", "k")}
    rates = [spec.tflops.get(c.dtype, spec.tflops["fp32"]) for c in calls]
    return found | {
        "half": flags([ELEMENT_BYTES[call.dtype] < 4 for call in calls]).long(),
        "size": double_tensor([ELEMENT_BYTES[call.dtype] for call in calls]),
        "rate": double_tensor([rate * 1e6 / spec.num_sms for rate in rates]),
        "alignment": double_tensor([_least_alignment(call) for call in calls]).long(),
        "layout": double_tensor([LAYOUTS.index(call.variant) for call in calls]).long(),
    }


def _product_start() -> Parameters:
    """(2, ..): single precision, half."""
    return {
        "share": constants(2, math.log(0.7), len(TILES)),
        "start": constants(2, 0.5),
        "wave": constants(2, 0.5),
        "memory": constants(2, 1.0),
        "write": constants(2, math.log(2e-4)),
        "split": constants(2, 0.5),
        "load": constants(2, math.log(4e4)),
        "tail": constants(2, 1.0),
        "batched": constants(2, 0.0),
        "alignment": constants(2, 0.0, int(ALIGNED) + 1),
        "layout": constants(2, 0.0, len(LAYOUTS)),
    }


def _product(x: Columns, p: Parameters, spec: DeviceSpec) -> Tensor:
    half = x["half"]

    def own(name: str) -> Tensor:
        return torch.exp(p[name][half])[:, None]

    m, n, k, batch, size = (
        x[name][:, None] for name in ("m", "n", "k", "batch", "size")
    )
    slower = p["alignment"][half, x["alignment"]] + p["layout"][half, x["layout"]]
    slower = slower + p["batched"][half] * (x["batch"] > 1)
    depth = torch.ceil(k / PARTS / 32) * 32
    rate = x["rate"][:, None] * torch.exp(p["share"][half][:, TILE] - slower[:, None])
    arithmetic = 2 * HEIGHTS * WIDTHS * depth / rate
    reading = size * (HEIGHTS + WIDTHS) * depth / own("load")
    tile = longer(arithmetic, reading) + own("write") * HEIGHTS * WIDTHS + own("wave")
    tiles = batch * torch.ceil(m / HEIGHTS) * torch.ceil(n / WIDTHS) * PARTS
    waves = in_waves(tiles, spec.num_sms, p["tail"][half][:, None])
    is_split = PARTS > 1
    moved = size * batch * (m * k + k * n + m * n)
    moved = moved + SPLIT_BYTES * PARTS * is_split * batch * m * n
    memory = moved_us(moved, p["memory"][half][:, None], spec)
    us = own("start") + longer(waves * tile, memory) + own("split") * is_split
    return -SPREAD * torch.logsumexp(-torch.log(us) / SPREAD, 1)


# -- attention ------------------------------------------------------------------------

ATTENTION = ("batch", "heads", "queries", "keys", "head_dim", "causal", "dropout")


def _attention_columns(calls: Sequence[Call], spec: DeviceSpec) -> Columns:
    found = {name: sizes(calls, name) for name in ATTENTION}
    distance = (found["head_dim"][:, None] - double_tensor(HEAD_DIMS)).abs()
    rates = [spec.tflops.get(c.dtype, spec.tflops["fp32"]) for c in calls]
    return found | {
        "backward": flags([call.variant == "backward" for call in calls]).long(),
        "dim": distance.argmin(1),
        "bytes": double_tensor([call.num_bytes for call in calls]),
        "rate": double_tensor([rate * 1e6 / spec.num_sms for rate in rates]),
    }


def _attention_start() -> Parameters:
    """(2, ..): forward, backward."""
    share = double_tensor([math.log(0.5), math.log(0.35)])[:, None]
    return {
        "share": share.repeat(1, len(HEAD_DIMS)),
        "start": double_tensor([1.0, 2.0]),
        "block": constants(2, 0.0),
        "pass": constants(2, -2.0),
        "memory": constants(2, 1.0),
        "dropout": constants(2, 0.3),
        "tail": constants(2, 0.0),
    }


def _attention(x: Columns, p: Parameters, spec: DeviceSpec) -> Tensor:
    back = x["backward"]
    key_blocks = torch.ceil(x["keys"] / BLOCK)
    blocks = x["batch"] * x["heads"] * torch.ceil(x["queries"] / BLOCK)
    waves = blocks / spec.num_sms
    # Less than a wave takes as long as its longest block.
    passes = torch.where(
        (x["causal"] > 0) & (waves >= 1), (key_blocks + 1) / 2, key_blocks
    )
    flops = torch.where(back > 0, 2.5, 1.0) * 4 * BLOCK * BLOCK * x["head_dim"]
    rate = x["rate"] * torch.exp(p["share"][back, x["dim"]])
    one = flops / rate * torch.exp(p["dropout"][back] * x["dropout"])
    one = one + torch.exp(p["pass"][back])
    block = passes * one + torch.exp(p["block"][back])
    body = in_waves(blocks, spec.num_sms, p["tail"][back]) * block
    memory = moved_us(x["bytes"], p["memory"][back], spec)
    return torch.log(torch.exp(p["start"][back]) + longer(body, memory))


# -- convolutions ---------------------------------------------------------------------

PATCH_CHANNELS = 8
"""Fewer are an image's: libraries have other kernels for them."""
PRODUCT_LIKE = 4
"""Groups: forward and backward, of patches or not, and forward of single elements."""


def _group(call: Call) -> int:
    backward = call.variant == "backward"
    if not backward and call.sizes["kernel"] == call.sizes["stride"] == 1:
        return PRODUCT_LIKE
    return 2 * backward + (call.sizes["channels"] < PATCH_CHANNELS)


def _convolution_columns(calls: Sequence[Call], spec: DeviceSpec) -> Columns:
    def log(name: str, usual: float) -> Tensor:
        return torch.log(sizes(calls, name) / usual)

    side = torch.ceil(sizes(calls, "side") / sizes(calls, "stride"))
    patch = flags([call.sizes["channels"] < PATCH_CHANNELS for call in calls])
    kernel = torch.log2(sizes(calls, "kernel"))
    return {
        "group": double_tensor([_group(call) for call in calls]).long(),
        "half": flags([ELEMENT_BYTES[call.dtype] < 4 for call in calls]).long(),
        "flops": double_tensor([call.flops for call in calls]),
        "bytes": double_tensor([call.num_bytes for call in calls]),
        "rows": log("batch", 1.0) + 2 * torch.log(side) - math.log(5000),
        "filters": log("filters", 300.0),
        "sum": log("channels", 600.0) + 2 * kernel * math.log(2),
        "kernel": kernel - 4 * patch,
        "strided": (1 - patch) * (sizes(calls, "stride") > 1),
    }


def _convolution_start() -> Parameters:
    count = PRODUCT_LIKE + 1
    names = ("rows", "filters", "sum", "kernel", "strided", "memory")
    return {
        "start": constants(count, 2.0),
        "rate": constants(count, math.log(0.05), 2),
        **{name: constants(count, 0.0) for name in names},
    }


def _convolution(x: Columns, p: Parameters, spec: DeviceSpec) -> Tensor:
    group = x["group"]
    log_rate = p["rate"][group, x["half"]]
    for name in ("rows", "filters", "sum", "kernel", "strided"):
        log_rate = log_rate - p[name][group] * x[name]
    # Those of single precision run on the units for 16 bits, too.
    peak = spec.tflops.get("bf16", spec.tflops["fp32"]) * 1e6
    arithmetic = x["flops"] / (torch.exp(log_rate) * peak)
    body = longer(arithmetic, moved_us(x["bytes"], p["memory"][group], spec))
    return torch.log(torch.exp(p["start"][group]) + body)


_FORMS: Mapping[KernelFamily, ClosedForm] = {
    KernelFamily.PRODUCT: ClosedForm(_product_columns, _product_start, _product),
    KernelFamily.ATTENTION: ClosedForm(
        _attention_columns, _attention_start, _attention
    ),
    KernelFamily.CONVOLUTION: ClosedForm(
        _convolution_columns, _convolution_start, _convolution
    ),
    **FORMS,
}
FAMILIES = frozenset(_FORMS)
"""That have a closed form."""


def least_times(family: KernelFamily) -> int:
    """Of a family, for its law. A fused update's few constants need few."""
    return 27 if family is KernelFamily.OPTIMIZER else 60


def first_law(family: KernelFamily) -> "Law":
    """A family's closed form before its constants are found."""
    with torch.device("cpu"):
        return Law(family, _FORMS[family].start())


def law_us(law: "Law | None", calls: Sequence[Call], spec: DeviceSpec) -> list[float]:
    """Microseconds by a closed form, or by the roofline where there is none."""
    if law is None:
        return [spec.roofline_us(call) for call in calls]
    return [math.exp(value) for value in law.log_us(calls, spec)]


@dataclass(frozen=True)
class Law:
    """A family's closed form with its constants. See [Note: tiles and waves]."""

    family: KernelFamily
    parameters: Parameters

    def log_us(self, calls: Sequence[Call], spec: DeviceSpec) -> list[float]:
        """Logarithms of the calls' microseconds."""
        form = _FORMS[self.family]
        with torch.no_grad(), torch.device("cpu"):  # whatever the default device is
            found = form.log_us(form.columns(calls, spec), self.parameters, spec)
        return [float(value) for value in found]

    def as_dict(self) -> dict[str, tuple[float, ...]]:
        """The constants by name, in rows one after the other."""
        return {
            name: tuple(float(f"{x:.5g}") for x in value.flatten().tolist())
            for name, value in self.parameters.items()
        }

    @classmethod
    def from_dict(
        cls, family: KernelFamily, values: Mapping[str, Sequence[float]]
    ) -> "Law":
        """Build a `Law` from what `as_dict` made. Raises ValueError: the family has no
        closed form, or one of other constants."""
        start = first_law(family).parameters if family in FAMILIES else {}
        counts = {name: value.numel() for name, value in start.items()}
        if not start or counts != {name: len(value) for name, value in values.items()}:
            raise ValueError(f"expects the constants {counts} of {family.value}")
        shaped = {
            n: double_tensor(values[n]).view(value.shape) for n, value in start.items()
        }
        return cls(family, shaped)


def fit_law(family: KernelFamily, sets: Sequence[tuple[Times, DeviceSpec]]) -> Law:
    """Find a family's constants on the times of one or several devices."""
    form = _FORMS[family]
    with torch.device("cpu"), torch.enable_grad():
        given = [
            (
                form.columns([call for call, _ in times], spec),
                torch.log(double_tensor([us for _, us in times])),
                spec,
            )
            for times, spec in sets
            if times
        ]
        parameters = {
            name: value.requires_grad_()
            for name, value in first_law(family).parameters.items()
        }
        optimizer = torch.optim.Adam(parameters.values(), lr=RATE)
        for step in range(NUM_STEPS):
            if step == NUM_STEPS - LATE_STEPS:
                optimizer.param_groups[0]["lr"] = LATE_RATE
            optimizer.zero_grad()
            each = [form.log_us(x, parameters, spec) - log for x, log, spec in given]
            errors = torch.cat(each)
            F.huber_loss(errors, torch.zeros_like(errors), delta=KNEE).backward()
            optimizer.step()
    return Law(family, {name: value.detach() for name, value in parameters.items()})
