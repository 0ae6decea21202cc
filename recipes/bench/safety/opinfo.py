"""Every differentiable sample of torch's operator database under ssdtrain.

Gradients are compared with plain autograd's, byte for byte, for all operators of
`op_db` in float32 and complex64. Written down: how many samples were equal, how many
both sides refused, how many are random in themselves, and every difference by name.

    OMP_NUM_THREADS=1 python -m recipes.bench safety.opinfo
"""

import logging
import time
from collections import Counter
from typing import Any, Literal

import torch

import ssdtrain
from recipes.bench.harness.cli import Bench
from tests.ssdtrain.graphs import opinfo_samples as opinfo

PARTS = 16


def run(part: int, recompute: str) -> dict[str, Any]:
    """One part of the operators."""
    plain, ours = opinfo.Caller(), opinfo.Caller()
    verdicts: Counter[str] = Counter()
    operators: set[str] = set()
    different = []
    start = time.monotonic()
    with ssdtrain.offload(
        ours,
        target="host",
        min_bytes=0,
        plan="offload-all",
        window_bytes=1,
        host_bytes=1 << 30,
        recompute=recompute,
        verify="checksum",
    ) as session:
        for sample in opinfo.samples(every=PARTS, at_most=10**6, offset=part):
            said = opinfo.verdict(plain, ours, sample)
            verdicts[said.partition(":")[0]] += 1
            operators.add(sample.name.rsplit("-", 2)[0])
            if said.startswith("DIFFERENT"):
                different.append([sample.name, said])
        steps = list(session.steps)
    return {
        "verdicts": dict(verdicts),
        "operators": len(operators),
        "different": different,
        "bytes_offloaded": sum(step.bytes_offloaded for step in steps),
        "num_verified": sum(step.num_verified for step in steps),
        "seconds": round(time.monotonic() - start, 1),
    }


def main(bench: Bench, *, recompute: Literal["auto", "off"] = "auto") -> None:
    """Run the parts that are missing, and add them up."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    settings = {"recompute": recompute, "parts": PARTS}
    cells = bench.cells(settings)
    for part in range(PARTS):
        cells.run(f"part {part}", run, part, recompute)
    parts = [c for name, c in cells.data["cells"].items() if name != "total"]
    total: Counter[str] = Counter()
    for cell in parts:
        total.update(cell.get("verdicts", {}))
    cells.data["cells"]["total"] = {
        "verdicts": dict(total),
        "operators": sum(cell.get("operators", 0) for cell in parts),
        "different": [d for cell in parts for d in cell.get("different", [])],
        "errors": [cell["error"] for cell in parts if "error" in cell],
    }
    cells.save()
    print(cells["total"])
