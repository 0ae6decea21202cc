"""The hints as a public interface: a schedule of torch.distributed.pipelining.

Two stages in one process, one thread each, exchange activations over gloo.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ssdtrain
from ssdtrain.counters import Count
from ssdtrain.engines.hints import Stage
from tests.ranks import run_ranks
from tests.ssdtrain.bits import same_bits

SCRIPT = Path(__file__).with_name("hinted_ranks.py")


def test_torch_pipelining_schedule_drives_the_hints(tmp_path: Path) -> None:
    run_ranks([SCRIPT, tmp_path], tmp_path)
    for rank in range(2):
        result = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert result["ours"] == result["theirs"]
        assert result["lanes"] == [f"model[{n}]" for n in range(4)]
        assert result["offloaded"] > 0
        assert result["prefetched"] > 0


def test_lane_per_micro_batch_and_prefetch_before_backward(everything: Any) -> None:
    torch.manual_seed(0)
    stage = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU())
    x = torch.randn(16, 32, requires_grad=True)
    expected = [torch.autograd.grad(stage(x * n).sum(), [x])[0] for n in range(3)]
    settings = {**everything, "prefetch_bytes": 1 << 20}
    with ssdtrain.offload(stage, **settings) as session:
        hints, outputs = session.hints, []
        for micro_batch in range(3):
            with hints.forward(micro_batch=micro_batch):
                outputs.append(stage(x * micro_batch).sum())
        loaded = session.cache.ledger.counters
        for micro_batch in range(3):
            hints.set_next_stage(Stage.BACKWARD, micro_batch=micro_batch)
            loaded.take()
            hints.prefetch_last_module()
            counts = loaded.take().counts
            if micro_batch < 2:  # the youngest is still in the window
                assert counts[Count.RELOADED] > 0
            found = torch.autograd.grad(outputs[micro_batch], [x])[0]
            assert same_bits(found, expected[micro_batch])
            hints.wait_io()
        hints.set_next_stage(Stage.FORWARD, micro_batch=0)
        hints.prefetch_last_module()
        hints.step_end()
        assert session.cache.is_idle
