"""The roofline rule of fusing two convolutions, against what happens on this CPU.

    python -m recipes.bench foresight.fusion --budget-s 120

Every pair of `fusion_rule.PAIRS` runs as inductor compiles it (two kernels), and in
horizontal strips whose intermediate stays in the cache (fused by tiling, the best of
some strip counts). Ceilings are measured here: the best rate of the pairs'
convolutions, and a copy that does not fit into the cache. Precision and recall are
of the advice to fuse.
"""

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from recipes.bench.foresight.fusion_rule import PAIRS, Kind, Pair, advise
from recipes.bench.harness import records
from recipes.bench.harness.records import RESULTS

STRIPS = (2, 4, 7)
COPY_BYTES = 1 << 28
REPEATS = 15
PAYS = 1.02


def _weights(pair: Pair) -> tuple[Tensor, Tensor, int, int]:
    c, f = pair.channels, pair.filters
    taps = 5 if pair.kind is Kind.DEPTHWISE5_POINTWISE else 3
    depthwise = pair.kind in (Kind.DEPTHWISE_POINTWISE, Kind.DEPTHWISE5_POINTWISE)
    first = torch.randn(c, 1 if depthwise else c, taps, taps)
    last = 3 if pair.kind is Kind.FULL_FULL else 1
    return first, torch.randn(f, c, last, last), c if depthwise else 1, taps // 2


def _apart(pair: Pair) -> tuple[Callable[[Tensor], Tensor], Callable[..., Tensor]]:
    first, second, groups, padding = _weights(pair)
    halo = second.shape[-1] // 2

    def apart(x: Tensor) -> Tensor:
        y = F.conv2d(x, first, stride=pair.stride, padding=padding, groups=groups)
        return F.conv2d(torch.relu(y), second, padding=halo)

    def strips(x: Tensor, number: int) -> Tensor:
        """Rows of the result in turn; each reads the rows of the image it needs."""
        padded = F.pad(x, (padding,) * 4)
        rows, parts = -(-pair.out // number), []
        for start in range(0, pair.out, rows):
            end = min(pair.out, start + rows)
            low, high = max(0, start - halo), min(pair.out, end + halo)
            top = low * pair.stride
            bottom = (high - 1) * pair.stride + first.shape[-1]
            y = F.conv2d(
                padded[:, :, top:bottom], first, stride=pair.stride, groups=groups
            )
            z = F.conv2d(torch.relu(y), second, padding=halo)
            parts.append(z[:, :, start - low : start - low + end - start])
        return torch.cat(parts, dim=2)

    return apart, strips


def _ms(body: Callable[[], Any]) -> float:
    body()
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        body()
        times.append(time.perf_counter() - began)
    return min(times) * 1e3


def measured(pair: Pair) -> dict[str, Any]:
    """Milliseconds apart and in strips."""
    x = torch.randn(1, pair.channels, pair.side, pair.side)
    apart, strips = _apart(pair)
    torch.testing.assert_close(apart(x), strips(x, 2), rtol=1e-3, atol=1e-2)
    torch.compiler.reset()  # every pair is a program of its own
    compiled = torch.compile(apart, dynamic=False)
    _ms(lambda: strips(x, 2))  # warms the caches that both use
    row = {"pair": pair.name, "apart_ms": _ms(lambda: compiled(x))}
    for number in STRIPS:
        if number <= pair.out:
            row[f"strips_{number}_ms"] = _ms(lambda n=number: strips(x, n))
    return row


def main(*, budget_s: float = 120.0) -> None:
    """Run it."""
    torch.set_grad_enabled(False)
    end = time.monotonic() + budget_s
    source = torch.randn(COPY_BYTES // 8)
    target = torch.empty_like(source)
    gb_per_s = COPY_BYTES / _ms(lambda: target.copy_(source)) / 1e6
    rows = []
    for pair in PAIRS:
        if time.monotonic() > end:
            break
        rows.append({**measured(pair), "gflop": pair.flops / 1e9})
    gflops = max(row["gflop"] / row["apart_ms"] * 1e3 for row in rows)
    for row, pair in zip(rows, PAIRS, strict=False):
        best = min(v for k, v in row.items() if k.startswith("strips"))
        row["gain"] = row["apart_ms"] / best
        row["predicted_gain"] = advise(pair, gflops, gb_per_s).gain
        row["advised"] = advise(pair, gflops, gb_per_s).may_pay
    advised = [row for row in rows if row["advised"]]
    paying = [row for row in rows if row["gain"] > PAYS]
    both = [row for row in advised if row["gain"] > PAYS]
    found = {
        "gflops": gflops,
        "gb_per_s": gb_per_s,
        "pairs": len(rows),
        "advised": len(advised),
        "paying": len(paying),
        "precision": len(both) / len(advised) if advised else None,
        "recall": len(both) / len(paying) if paying else None,
        "gain_of_advised": _geomean([row["gain"] for row in advised]),
        "gain_of_others": _geomean([r["gain"] for r in rows if not r["advised"]]),
    }
    print(json.dumps(found, indent=1))
    path = RESULTS / "foresight" / "fusion_cpu.json"
    records.write(path, {**found, "rows": rows})


def _geomean(values: list[float]) -> float | None:
    return statistics.geometric_mean(values) if values else None
