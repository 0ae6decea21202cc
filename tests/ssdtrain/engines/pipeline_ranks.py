"""Two DeepSpeed pipeline ranks on gloo, without ssdtrain and with each target; run as a
script.

    pipeline_ranks.py OUT_DIRECTORY

Each rank writes what it saw to OUT_DIRECTORY/rank<N>.json.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
from deepspeed.ops import __compatible_ops__
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import Tensor, nn

import ssdtrain
from ssdtrain.tools.foresight.graph import write_graph
from ssdtrain.tools.foresight.steps import capture_step
from tests.ranks import leave
from tests.ssdtrain.targets import TARGETS, settings_of

# The shared-memory op is compiled at start; without a compiler that fails.
__compatible_ops__["deepspeed_shm_comm"] = False

HIDDEN, SEQUENCE, VOCABULARY = 32, 16, 64
NUM_MICRO_BATCHES, NUM_STEPS = 4, 3
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": NUM_MICRO_BATCHES,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "steps_per_print": 10**9,
}


class Block(nn.Module):
    """A pre-norm MLP with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.nn.functional.gelu(self.up(self.norm(x)))
        return x + self.dropout(self.down(y))


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def run(settings: dict[str, Any] | None, graph: Path | None = None) -> dict[str, Any]:
    torch.manual_seed(0)
    layers = [
        LayerSpec(nn.Embedding, VOCABULARY, HIDDEN),
        *[LayerSpec(Block) for _ in range(4)],
        LayerSpec(nn.Linear, HIDDEN, VOCABULARY),
    ]
    module = PipelineModule(
        layers, num_stages=2, loss_fn=loss_of, partition_method="uniform"
    )
    engine, *_ = deepspeed.initialize(
        model=module, model_parameters=module.parameters(), config=CONFIG
    )
    session = None if settings is None else ssdtrain.offload(engine, **settings)
    torch.manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (100, 2, SEQUENCE))
    batches = iter([(row, row) for row in tokens])
    losses = [engine.train_batch(batches).item() for _ in range(NUM_STEPS)]
    result = {
        "losses": losses,
        "parameters": [p.detach().flatten().tolist() for p in module.parameters()],
    }
    if graph is not None:
        found = capture_step(lambda: engine.train_batch(batches), engine, num_warm=0)
        write_graph(graph, found)
    if session is not None:
        result["reports"] = [report.as_dict() for report in session.steps]
        session.close()
    result["attributes"] = sorted(vars(engine))
    return result


def main() -> None:
    out, rank = Path(sys.argv[1]), os.environ["RANK"]
    torch.use_deterministic_algorithms(True)
    deepspeed.init_distributed("gloo")
    results = {"without": run(None, out / f"graph{rank}.json")}
    for target in TARGETS:
        directory = out / f"{target}{rank}"
        directory.mkdir()
        results[target] = run(
            {
                **settings_of(target, directory),
                "min_bytes": 0,
                "plan": "offload-all",
                "window_bytes": 1,
                "host_bytes": 64 * 1024 * 1024,
            }
        )
    (out / f"rank{rank}.json").write_text(json.dumps(results))
    leave()


if __name__ == "__main__":
    main()
