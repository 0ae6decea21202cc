"""Closed forms of kernels' times, whose few constants are found by gradient descent.

What boosted trees then have to learn is small, and what they learn of one shape says
more of another. Logarithms of times come out, so that errors are relative.

[Note: tiles and waves]
A product cuts its result into tiles; each multiprocessor works on one at a time, so
tiles run in waves. Which tile, and into how many parts the sum is split, the library
chooses: the fastest of all that a law knows. A tile takes its arithmetic at the rate of
its shape, or the reading of its operands, then its writing; the whole takes memory's
time at least. Attention is blocks of queries that pass over blocks of keys, up to the
diagonal where it is causal. The rest moves bytes: at memory's rate, or at the cache's
where they were touched a short while ago or fit into it.
(tests/ssdtrain/foresight/test_laws.py)
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ssdtrain.foresight.call import ELEMENT_BYTES, Call, Family
from ssdtrain.foresight.calls import LOOKUPS, OPTIMIZERS
from ssdtrain.foresight.features import LAYOUTS, MEMORY, NORMS, alignment
from ssdtrain.foresight.spec import Spec

Times = Sequence[tuple[Call, float]]
Columns = Mapping[str, Tensor]
"""One number a call, by name."""
Parameters = Mapping[str, Tensor]

LEAST_TIMES = 60
"""Of a family, for its law."""
NUM_STEPS, LATE_STEPS = 350, 110
RATE, LATE_RATE = 0.05, 0.015
KNEE = 0.1
"""Relative errors count squared up to here, and singly beyond."""
SHARPNESS = 4.0
"""Of the longer of two times that overlap: a norm's exponent."""

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
L2_TB_PER_S = 6.0
ALIGNED = 3.0
"""log2 of the elements behind which alignment no longer matters."""


def _numbers(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def _longer(first: Tensor, second: Tensor) -> Tensor:
    """Of two times that overlap, nearly."""
    power: Tensor = (first**SHARPNESS + second**SHARPNESS) ** (1 / SHARPNESS)
    return power


def _moved_us(num_bytes: Tensor, share: Tensor, spec: Spec) -> Tensor:
    return num_bytes / (spec.memory_gb_per_s * 1e3 * torch.sigmoid(share))


def _in_waves(tiles: Tensor, num_sms: int, tail: Tensor) -> Tensor:
    """Waves; what the last one lacks counts by the share `tail`."""
    waves = tiles / num_sms
    full = torch.ceil(waves)
    return torch.where(waves <= 1, full, waves + torch.sigmoid(tail) * (full - waves))


# -- products -------------------------------------------------------------------------

HEIGHTS = _numbers([h for h, _ in TILES for _ in SPLITS])
WIDTHS = _numbers([w for _, w in TILES for _ in SPLITS])
PARTS = _numbers([s for _ in TILES for s in SPLITS])
TILE = _numbers([float(at) for at, _ in enumerate(TILES) for _ in SPLITS]).long()


def _least_alignment(call: Call) -> float:
    """Of both operands' rows and of the result's."""
    s = call.sizes
    first = s["k"] if call.variant[0] == "n" else s["m"]
    second = s["n"] if call.variant[1] == "n" else s["k"]
    return min(ALIGNED, *(alignment(size) for size in (first, second, s["n"])))


def _product_columns(calls: Sequence[Call], spec: Spec) -> Columns:
    found = {
        name: _numbers([call.sizes[name] for call in calls])
        for name in ("batch", "m", "n", "k")
    }
    rates = [spec.tflops.get(c.dtype, spec.tflops["fp32"]) for c in calls]
    return found | {
        "half": _numbers(
            [float(ELEMENT_BYTES[call.dtype] < 4) for call in calls]
        ).long(),
        "size": _numbers([ELEMENT_BYTES[call.dtype] for call in calls]),
        "rate": _numbers([rate * 1e6 / spec.num_sms for rate in rates]),
        "alignment": _numbers([_least_alignment(call) for call in calls]).long(),
        "layout": _numbers(
            [float(LAYOUTS.index(call.variant)) for call in calls]
        ).long(),
    }


def _product_start() -> Parameters:
    """(2, ..): single precision, half."""
    return {
        "share": torch.full((2, len(TILES)), math.log(0.7)).double(),
        "start": torch.full((2,), 0.5).double(),
        "wave": torch.full((2,), 0.5).double(),
        "memory": torch.ones(2).double(),
        "write": torch.full((2,), math.log(2e-4)).double(),
        "split": torch.full((2,), 0.5).double(),
        "load": torch.full((2,), math.log(4e4)).double(),
        "tail": torch.ones(2).double(),
        "batched": torch.zeros(2).double(),
        "alignment": torch.zeros(2, int(ALIGNED) + 1).double(),
        "layout": torch.zeros(2, len(LAYOUTS)).double(),
    }


def _product(x: Columns, p: Parameters, spec: Spec) -> Tensor:
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
    tile = _longer(arithmetic, reading) + own("write") * HEIGHTS * WIDTHS + own("wave")
    tiles = batch * torch.ceil(m / HEIGHTS) * torch.ceil(n / WIDTHS) * PARTS
    waves = _in_waves(tiles, spec.num_sms, p["tail"][half][:, None])
    is_split = PARTS > 1
    moved = size * batch * (m * k + k * n + m * n)
    moved = moved + SPLIT_BYTES * PARTS * is_split * batch * m * n
    memory = _moved_us(moved, p["memory"][half][:, None], spec)
    us = own("start") + _longer(waves * tile, memory) + own("split") * is_split
    return -SPREAD * torch.logsumexp(-torch.log(us) / SPREAD, 1)


# -- attention ------------------------------------------------------------------------

ATTENTION = ("batch", "heads", "queries", "keys", "head_dim", "causal", "dropout")


def _attention_columns(calls: Sequence[Call], spec: Spec) -> Columns:
    found = {name: _numbers([c.sizes[name] for c in calls]) for name in ATTENTION}
    nearest = [
        min(
            range(len(HEAD_DIMS)), key=lambda i: abs(HEAD_DIMS[i] - c.sizes["head_dim"])
        )
        for c in calls
    ]
    rates = [spec.tflops.get(c.dtype, spec.tflops["fp32"]) for c in calls]
    return found | {
        "backward": _numbers(
            [float(call.variant == "backward") for call in calls]
        ).long(),
        "dim": torch.tensor(nearest),
        "bytes": _numbers([call.num_bytes for call in calls]),
        "rate": _numbers([rate * 1e6 / spec.num_sms for rate in rates]),
    }


def _attention_start() -> Parameters:
    """(2, ..): forward, backward."""
    share = torch.tensor([[math.log(0.5)], [math.log(0.35)]]).expand(-1, len(HEAD_DIMS))
    return {
        "share": share.double().clone(),
        "start": _numbers([1.0, 2.0]),
        "block": torch.zeros(2).double(),
        "pass": torch.full((2,), -2.0).double(),
        "memory": torch.ones(2).double(),
        "dropout": torch.full((2,), 0.3).double(),
        "tail": torch.zeros(2).double(),
    }


def _attention(x: Columns, p: Parameters, spec: Spec) -> Tensor:
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
    body = _in_waves(blocks, spec.num_sms, p["tail"][back]) * block
    memory = _moved_us(x["bytes"], p["memory"][back], spec)
    return torch.log(torch.exp(p["start"][back]) + _longer(body, memory))


# -- what moves bytes -----------------------------------------------------------------

VARIANTS: Mapping[Family, Sequence[str]] = {
    Family.MEMORY: MEMORY,
    Family.NORM: NORMS,
    Family.LOOKUP: LOOKUPS,
    Family.OPTIMIZER: tuple(sorted(OPTIMIZERS)),
}


def _bytes_columns(calls: Sequence[Call], spec: Spec) -> Columns:
    variants = VARIANTS[calls[0].family]
    return {
        "variant": torch.tensor([variants.index(call.variant) for call in calls]),
        "half": _numbers([float(ELEMENT_BYTES[call.dtype] < 4) for call in calls]),
        "read": _numbers([call.read_bytes - call.warm_bytes for call in calls]),
        "warm": _numbers([call.warm_bytes for call in calls]),
        "written": _numbers([call.written_bytes for call in calls]),
        "pieces": _numbers(
            [call.sizes.get("tensors", call.sizes.get("rows", 0.0)) for call in calls]
        ),
    }


def _bytes_start(family: Family) -> Parameters:
    count = len(VARIANTS[family])
    return {
        "start": torch.full((count,), 0.5).double(),
        "memory": torch.ones(count).double(),
        "half": torch.zeros(count).double(),
        "cache": torch.full((count,), math.log(L2_TB_PER_S)).double(),
        "piece": torch.full((count,), -9.0).double(),
        "room": _numbers([math.log(0.5)]),
        "edge": torch.zeros(1).double(),
    }


def _bytes(x: Columns, p: Parameters, spec: Spec) -> Tensor:
    variant = x["variant"]
    size = x["read"] + x["warm"] + x["written"]
    room = p["room"] + math.log(max(1.0, 2.0 * spec.l2_bytes))
    inside = torch.sigmoid((room - torch.log(size)) * torch.exp(p["edge"]))
    share = p["memory"][variant] + p["half"][variant] * x["half"]
    memory = _moved_us(x["read"] + x["written"] * (1 - inside), share, spec)
    cache = torch.exp(p["cache"][variant]) * 1e6
    fast = (x["warm"] + x["written"] * inside) / cache
    pieces = torch.exp(p["piece"][variant]) * x["pieces"]
    return torch.log(torch.exp(p["start"][variant]) + memory + fast + pieces)


class _Form(NamedTuple):
    """A family's closed form."""

    columns: Callable[[Sequence[Call], Spec], Columns]
    start: Callable[[], Parameters]
    log_us: Callable[[Columns, Parameters, Spec], Tensor]


def _of_bytes(family: Family) -> _Form:
    return _Form(_bytes_columns, lambda: _bytes_start(family), _bytes)


_FORMS: Mapping[Family, _Form] = {
    Family.PRODUCT: _Form(_product_columns, _product_start, _product),
    Family.ATTENTION: _Form(_attention_columns, _attention_start, _attention),
    **{family: _of_bytes(family) for family in VARIANTS},
}
FAMILIES = frozenset(_FORMS)
"""That have a closed form."""


def first_law(family: Family) -> "Law":
    """A family's closed form before its constants are found."""
    with torch.device("cpu"):
        return Law(family, _FORMS[family].start())


def law_us(law: "Law | None", calls: Sequence[Call], spec: Spec) -> list[float]:
    """Microseconds by a closed form, or by the roofline where there is none."""
    if law is None:
        return [spec.roofline_us(call) for call in calls]
    return [math.exp(value) for value in law.log_us(calls, spec)]


@dataclass(frozen=True)
class Law:
    """A family's closed form with its constants. See [Note: tiles and waves]."""

    family: Family
    parameters: Parameters

    def log_us(self, calls: Sequence[Call], spec: Spec) -> list[float]:
        """Logarithms of the calls' microseconds."""
        form = _FORMS[self.family]
        with torch.no_grad(), torch.device("cpu"):  # whatever the default device is
            found = form.log_us(form.columns(calls, spec), self.parameters, spec)
        return [float(value) for value in found]

    def as_dict(self) -> dict[str, tuple[float, ...]]:
        """The constants by name, in rows one behind the other."""
        return {
            name: tuple(float(f"{x:.5g}") for x in value.flatten().tolist())
            for name, value in self.parameters.items()
        }

    @classmethod
    def from_dict(cls, family: Family, values: Mapping[str, Sequence[float]]) -> "Law":
        """Build a `Law` from what `as_dict` made.

        Raises:
            ValueError: the family has no closed form, or one of other constants.
        """
        start = first_law(family).parameters if family in FAMILIES else {}
        sizes = {name: value.numel() for name, value in start.items()}
        if not start or sizes != {name: len(value) for name, value in values.items()}:
            raise ValueError(f"expects the constants {sizes} of {family.value}")
        return cls(
            family,
            {
                name: _numbers(values[name]).view(value.shape)
                for name, value in start.items()
            },
        )


def fit_law(family: Family, sets: Sequence[tuple[Times, Spec]]) -> Law:
    """Find a family's constants on the times of one or several devices.

    Args:
        family: of `FAMILIES`.
        sets: kernels and their microseconds, and the device that they were timed on.
    """
    form = _FORMS[family]
    with torch.device("cpu"), torch.enable_grad():
        given = [
            (
                form.columns([call for call, _ in times], spec),
                torch.log(_numbers([us for _, us in times])),
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
            errors = torch.cat(
                [
                    form.log_us(columns, parameters, spec) - log
                    for columns, log, spec in given
                ]
            )
            F.huber_loss(errors, torch.zeros_like(errors), delta=KNEE).backward()
            optimizer.step()
    return Law(family, {name: value.detach() for name, value in parameters.items()})
