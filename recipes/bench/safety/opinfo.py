"""Every differentiable sample of torch's operator database under ssdtrain.

Gradients are compared with plain autograd's, byte for byte, for all operators of
`op_db` in float32 and complex64. Written down: how many samples were equal, how many
both sides refused, how many are random in themselves, and every difference by name.

    OMP_NUM_THREADS=1 python -m recipes.bench safety.opinfo
"""

from collections import Counter

import ssdtrain
from recipes.bench.harness.cli import Bench
from recipes.bench.safety.blocks import Sums, run_campaign
from tests.ssdtrain.graphs import opinfo_samples as opinfo

PARTS = 16
MOVES = {
    **{"target": "host", "min_bytes": 0, "plan": "offload-all", "window_bytes": 1},
    **{"host_bytes": 1 << 30, "recompute": "auto", "verify": "checksum"},
}


def run_block(part: int) -> Sums:
    """One part of the operators."""
    plain, ours = opinfo.Caller(), opinfo.Caller()
    verdicts: Counter[str] = Counter()
    operators: set[str] = set()
    different = []
    with ssdtrain.offload(ours, **MOVES) as session:
        for sample in opinfo.samples(every=PARTS, at_most=10**6, offset=part):
            said = opinfo.verdict(plain, ours, sample)
            verdicts[said.partition(":")[0]] += 1
            operators.add(sample.name.rsplit("-", 2)[0])
            if said.startswith("DIFFERENT"):
                different.append([sample.name, said])
        num_verified = sum(step.num_verified for step in session.steps)
    counts = {"parts": 1, "operators": len(operators), "num_verified": num_verified}
    return {**counts, "verdicts": dict(verdicts), "different": different}


def main(bench: Bench, *, workers: int = 1) -> None:
    """Run the parts that are missing.

    Args:
        workers: processes
    """
    cells = bench.cells({"parts": PARTS})
    run_campaign(cells, run_block, PARTS, counted="parts", workers=workers)
