"""An Accelerate script on two ranks, with and without ssdtrain; `test_callback.py`.

Gradients of three batches are accumulated and clipped, the last batch of an epoch is
smaller, the last group of batches as well, one layer is never used, and there is
evaluation in between.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.nn import functional as F

import ssdtrain
from tests.ranks import leave
from tests.ssdtrain.bits import same_bits

WIDTH, VOCABULARY, NUM_EPOCHS = 16, 32, 3


class Model(nn.Module):
    """Blocks with dropout, and a layer that no loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH),
                nn.Linear(WIDTH, 4 * WIDTH),
                nn.GELU(),
                nn.Dropout(0.1),
                nn.Linear(4 * WIDTH, WIDTH),
            )
            for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.spare = nn.Linear(2, 2)

    def forward(self, ids: Tensor) -> Tensor:
        """(batch, rows) to logits."""
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def train(precision: str, settings: dict[str, Any] | None) -> tuple[list[Tensor], Any]:
    """Losses, evaluations and weights, and the reports."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    torch.manual_seed(0)
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=precision,
        gradient_accumulation_steps=3,
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
    )
    model: Any = Model()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    draw = torch.Generator().manual_seed(1)
    data: Any = torch.randint(VOCABULARY, (29, 8), generator=draw)
    loader: Any = torch.utils.data.DataLoader(data, batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    session = None if settings is None else ssdtrain.offload(model, **settings)
    torch.manual_seed(accelerator.process_index)
    found: list[Tensor] = []
    for _ in range(NUM_EPOCHS):
        for batch in loader:
            with accelerator.accumulate(model):
                logits = model(batch).float()
                loss = F.cross_entropy(logits.flatten(0, 1), batch.flatten())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            found.append(loss.detach().clone())
        model.eval()
        with torch.no_grad():
            sums = [accelerator.gather_for_metrics(model(b)).sum() for b in loader]
        found += [each.clone() for each in sums]
        model.train()
    reports = [] if session is None else session.steps
    if session is not None:
        session.close()
    return found + [p.detach().clone() for p in model.parameters()], reports


def main(out: Path) -> None:
    """One rank."""
    found = {}
    for precision in ("no", "bf16"):
        theirs, _ = train(precision, None)
        settings = {"target": "host", "min_bytes": 0, "plan": "offload-all"}
        ours, reports = train(precision, settings)
        found[precision] = {
            "equal": len(ours) == len(theirs) and same_bits(ours, theirs),
            "reports": [report.as_dict() for report in reports],
        }
    rank = AcceleratorState().process_index
    out.with_suffix(f".{rank}").write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
