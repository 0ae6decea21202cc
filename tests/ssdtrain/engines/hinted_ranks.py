"""One rank of a torch.distributed.pipelining 1F1B schedule; run as a script.

    hinted_ranks.py OUT_DIRECTORY RANK

ssdtrain knows nothing of this scheduler: the stage's own forward and backward
callbacks give the hints.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import ssdtrain
from ssdtrain.engines.hints import Hints, Stage
from tests.ranks import leave

NUM_MICRO_BATCHES, WIDTH = 4, 32


class Hinted(PipelineStage):
    """A stock stage that tells the hints what the schedule makes it do."""

    hints: Hints | None = None
    lanes: tuple[str, ...] = ()

    def forward_one_chunk(self, chunk: int, *args: Any, **kwargs: Any) -> Any:
        if self.hints is None:
            return super().forward_one_chunk(chunk, *args, **kwargs)
        self.hints.set_stage(Stage.FORWARD, micro_batch=chunk)
        result = super().forward_one_chunk(chunk, *args, **kwargs)
        self.lanes = (*self.lanes, self.hints._cache.lanes.latest_name)
        return result

    def backward_one_chunk(self, chunk: int, *args: Any, **kwargs: Any) -> Any:
        if self.hints is not None:
            self.hints.set_next_stage(Stage.BACKWARD, micro_batch=chunk)
            self.hints.prefetch_last_module()
        result = super().backward_one_chunk(chunk, *args, **kwargs)
        if self.hints is not None:
            self.hints.wait_io()
        return result


def build(rank: int) -> nn.Module:
    torch.manual_seed(rank)
    pairs = [(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3)]
    return nn.Sequential(*[layer for pair in pairs for layer in pair])


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def run(rank: int, settings: dict[str, Any] | None) -> dict[str, Any]:
    module = build(rank)
    stage = Hinted(module, rank, 2, torch.device("cpu"))
    session = None if settings is None else ssdtrain.offload(module, **settings)
    if session is not None:
        stage.hints = session.hints
    schedule = Schedule1F1B(stage, NUM_MICRO_BATCHES, loss_fn=loss_of)
    torch.manual_seed(7)
    x = torch.randn(8 * NUM_MICRO_BATCHES, WIDTH)
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=torch.zeros_like(x), losses=[])
    result: dict[str, Any] = {
        "gradients": [p.grad.flatten().tolist() for p in module.parameters()]
    }
    if session is not None:
        session.hints.step_end()
        report = session.last_step
        result |= {
            "lanes": list(stage.lanes),
            "offloaded": report.bytes_offloaded,
            "prefetched": report.bytes_reloaded,
        }
        session.close()
    return result


def main() -> None:
    out = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.use_deterministic_algorithms(True)
    settings = {
        "target": "host",
        "min_bytes": 0,
        "plan": "offload-all",
        "window_bytes": 1,
        "host_bytes": 1 << 26,
    }
    theirs, ours = run(rank, None), run(rank, settings)
    result = {
        "ours": ours["gradients"],
        "theirs": theirs["gradients"],
        **{name: ours[name] for name in ("lanes", "offloaded", "prefetched")},
    }
    (out / f"rank{rank}.json").write_text(json.dumps(result))
    leave()


if __name__ == "__main__":
    main()
