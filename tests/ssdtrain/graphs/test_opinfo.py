"""A sample of torch's operator database (`bench.safety.opinfo` runs all of it)."""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import ssdtrain

sys.path.insert(0, str(Path(__file__).parent))
from opinfo_samples import Caller, samples, verdict


def test_operators_give_the_same_gradients(everything: Any) -> None:
    plain, ours = Caller(), Caller()
    verdicts: Counter[str] = Counter()
    different = []
    with ssdtrain.offload(ours, **everything) as session:
        for sample in samples(every=24, at_most=2):
            said = verdict(plain, ours, sample)
            verdicts[said.partition(":")[0]] += 1
            if said.startswith("DIFFERENT"):
                different.append((sample.name, said))
        moved = sum(step.bytes_offloaded for step in session.steps)
    assert not different
    assert verdicts["equal"] > 35
    assert moved > 0
