"""What `ssdtrain fits` foretells of public models, written before they are measured.

    python -m recipes.bench models.held_out --foretell     # a CPU
    python -m recipes.bench models.held_out                # the GPU

The first command writes, for each model, what plain training, checkpointing and
ssdtrain's plan in a memory between the two are said to take. The second one trains the
same models, weights random, in processes of their own, and adds what they took. A step
ends with fused AdamW; its peak has everything in it. A rerun goes on.
"""

import statistics
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from recipes.bench.harness.cli import Bench
from recipes.bench.harness.processes import answer_of
from recipes.bench.harness.timing import Peak, wait
from recipes.bench.models.stock import checkpoint
from recipes.bench.models.unseen import warm_up
from ssdtrain.tools.foresight.device import load_device
from ssdtrain.tools.report.build_public import Loss, Train, public_subject, shape_of
from ssdtrain.tools.report.capture import Question, captured_step
from ssdtrain.tools.report.fits import CHECKPOINTING, OURS, PLAIN, planned, priced_ways

GPU = "h200"
BETWEEN = 0.3
"""Memory of ssdtrain's plan: so far from checkpointing's to that of plain training."""
STEPS = 5
"""Timed ones."""
LIMIT_S = 120.0
"""Of a process."""
PRELOAD = ("torch", "transformers", "recipes.bench.models.stock")


@dataclass(frozen=True)
class Held:
    """A model of the shipped table, and how it is trained."""

    model: str
    train: Train
    tokens: int

    @property
    def name(self) -> str:
        """Such as `llama-3.2-1b/full/8k`."""
        return f"{self.model}/{self.train.value}/{self.tokens // 1024}k"


HELD = tuple(
    Held(model, Train(train), tokens * 1024)
    for model, train, tokens in (
        ("llama-3.2-1b", "full", 8),
        ("qwen2.5-7b", "lora", 8),
        ("t5-large", "full", 16),
        ("vit-huge", "full", 32),
        ("mistral-7b", "lora", 16),
        ("whisper-large-v3", "full", 8),
        ("gemma-2-2b", "full", 4),
        ("llama-3.2-3b", "full", 16),
        ("llama-3.1-8b", "lora", 16),
        ("qwen3-1.7b", "full", 16),
        ("qwen3-0.6b", "full", 16),
        ("t5-large", "full", 8),
    )
)


def foretold(held: Held) -> dict[str, Any]:
    """ms and whole peak of each way, and the memory of ssdtrain's plan."""
    question = Question(model=held.model, train=held.train, tokens=held.tokens, gpu=GPU)
    shape = shape_of(held.model, held.train, Loss.STOCK)
    captured = captured_step(question, shape, load_device(GPU), held.tokens)
    ways = priced_ways(captured)
    least, most = ways[CHECKPOINTING][1], ways[PLAIN][1]
    memory = int(least + BETWEEN * (most - least))
    ms, peak, _ = planned(captured, memory)
    ways[OURS] = ms, peak
    told = {
        name: {"foretold_ms": round(ways[name][0], 1), "foretold_bytes": ways[name][1]}
        for name in (PLAIN, CHECKPOINTING, OURS)
    }
    return {"device_memory": memory, "ways": told}


class Training:
    """A model of the table on a device."""

    def __init__(self, held: Held, device: torch.device) -> None:
        self.device = device
        shape = shape_of(held.model, held.train, Loss.STOCK)
        torch.manual_seed(0)
        with device:
            # Token ids and labels that every model of the table has.
            ids = partial(torch.randint, 100)
            subject = public_subject(shape, held.tokens, lambda *size: ids(size))
        self.model, self.forward = subject.model, subject.forward
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, 1e-5, fused=True)

    def step(self) -> float:
        """ms."""
        start = wait(self.device)
        self.forward().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return (wait(self.device) - start) * 1e3

    def told(self) -> dict[str, Any]:
        """Of some steps: the median time, and the largest peak."""
        memory = Peak(self.device)
        times = [self.step() for _ in range(STEPS)]
        peak = memory.base + memory.most
        return {"ms": round(statistics.median(times), 1), "bytes": peak}


def measure_others(held: Held, device: str) -> dict[str, Any]:
    """What plain training and checkpointing took."""
    training, found = Training(held, torch.device(device)), {}
    for name, options in ((PLAIN, None), (CHECKPOINTING, {"use_reentrant": False})):
        checkpoint(training.model, options)
        for _ in range(2):
            training.step()
        found[name] = training.told()
    return found


def measure_ours(held: Held, device: str, memory: int, warm_s: float) -> dict[str, Any]:
    """What ssdtrain's plan took, settled or not."""
    import ssdtrain

    training = Training(held, torch.device(device))
    with ssdtrain.offload(training.model, device_memory=memory) as session:
        found = warm_up(training.step, session, warm_s)
        found |= training.told() | {"settled": session.is_settled}
        found |= {"explain": session.explain().splitlines()[:20]}
    return {OURS: found}


def main(bench: Bench, *, foretell: bool = False, warm_s: float = 30) -> None:
    """Foretell, or measure what was foretold and has no figures yet.

    Args:
        foretell: write predictions, for models that have none
        warm_s: most of ssdtrain's warm-up
    """
    cells = bench.cells({"gpu": GPU})
    if foretell:
        for held in HELD:
            cells.run(held.name, foretold, held)
        return
    device = bench.device.type
    for held in HELD:
        if held.name not in cells or "ms" in cells[held.name]["ways"][OURS]:
            continue
        before = cells[held.name]
        memory, ways = before["device_memory"], before["ways"]
        for work, more in ((measure_others, ()), (measure_ours, (memory, warm_s))):
            if cells.left_s() > 0:
                found = answer_of(work, (held, device, *more), LIMIT_S, PRELOAD)
                if "error" in found:
                    found = {PLAIN: found}
                ways = {name: {**ways[name], **found.get(name, {})} for name in ways}
        cells.record(held.name, {**before, "ways": ways})
