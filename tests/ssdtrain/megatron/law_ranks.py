"""Two Megatron ranks on gloo, every cell with and without ssdtrain; run as a script.

    law_ranks.py OUT_DIRECTORY [CELL]

Each rank writes what it saw to OUT_DIRECTORY/rank<N>.json.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ssdtrain
from ssdtrain.tools.foresight.graph import write_graph
from ssdtrain.tools.foresight.steps import capture_step
from ssdtrain.train.data.batches import Batch
from ssdtrain.train.settings import Family, ModelSettings
from tests.ranks import leave
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.megatron.standin import CPU, cpu_for_cuda

WIDTH, LENGTH, ROWS, VOCABULARY = 32, 16, 2, 64
NUM_STEPS = 2
EVERYTHING: dict[str, Any] = {
    "min_bytes": 0,
    "plan": "offload-all",
    "window_bytes": 1,
    "prefetch_bytes": 1 << 14,
    "host_bytes": 1 << 26,
}


class Cell(NamedTuple):
    """One way to train one model."""

    name: str
    family: Family
    parallel: Mapping[str, Any] = MappingProxyType({})
    fused: bool = True
    """torch's attention, or Megatron's own."""
    recipes: bool = False
    more: Mapping[str, Any] = MappingProxyType({})
    """Fields of TransformerConfig."""
    wrapped: bool = False
    """Megatron's DistributedDataParallel and distributed optimizer around it."""
    evaluate: bool = False
    """A pass with forward_only between the steps."""
    agreed: bool = False
    """Also under `plan="auto"`, whose plan both ranks tell."""
    layers: int = 0
    """0: as many as two ranks need."""

    @property
    def num_layers(self) -> int:
        """One a chunk of an interleaved model, two of each kind elsewhere."""
        if self.layers:
            return self.layers
        return 4 if "virtual_pipeline" in self.parallel else 2

    @property
    def targets(self) -> tuple[str, ...]:
        """To a store, families are alike."""
        return ("host", "ssd") if self.family is Family.GPT else ("host",)

    @property
    def num_micro_batches(self) -> int:
        """Two add their gradients; stages need more to overlap."""
        return 4 if "pipeline" in self.parallel else 2


LAYOUTS: dict[str, dict[str, Any]] = {
    "no pipelining": {},
    "tp 2": {"tensor": 2},
    "1f1b": {"pipeline": 2},
    "interleaved": {"pipeline": 2, "virtual_pipeline": 2},
}


NORMS = {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}


def cells() -> list[Cell]:
    """Ordered so that cells of one layout share Megatron's groups."""
    found = []
    for layout, parallel in LAYOUTS.items():
        for family in Family:
            if family is Family.T5 and layout == "interleaved":
                continue
            name = f"{family.value}, {layout}"
            fused = layout != "tp 2"
            gpt = family is Family.GPT
            own = {"agreed": gpt and layout in ("tp 2", "1f1b")}
            own["evaluate"] = gpt and layout == "interleaved"
            found.append(Cell(name, family, parallel, fused, **own))
    tp, pp, one = {"tensor": 2}, {"pipeline": 2}, Family.GPT
    found += [
        Cell("sequence parallel", one, {**tp, "sequence": True}, recipes=True),
        Cell("full recompute", one, {**pp, "recompute": "full"}),
        Cell("selective recompute", one, {**tp, "recompute": "selective"}, False),
        Cell("norms recomputed", one, pp, more=NORMS),
        Cell("recipes, 1f1b", one, pp, False, True),
        Cell("recipes, bert tp 2", Family.BERT, tp, True, True),
        Cell("distributed optimizer", one, {}, wrapped=True),
    ]
    return sorted(found, key=lambda cell: sorted(cell.parallel))


def batches(family: Family, rank: int, step: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    while True:
        ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
        text = torch.ones_like(ids)
        text[0, LENGTH // 2 :] = int(torch.randint(0, 2, (), generator=generator))
        inputs = {
            Family.GPT: (ids,),
            Family.BERT: (ids, text),
            Family.T5: (ids, ids.flip(1)),
        }[family]
        yield Batch(inputs, ids)


class Training:
    """One model under one schedule."""

    def __init__(self, cell: Cell) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from ssdtrain.train.mcore import models, parallel, steps

        layout = parallel.Parallel(**cell.parallel)
        parallel.seed_everything(7)
        # Fetched before offload(), as most loops do.
        self.run = get_forward_backward_func()
        settings = ModelSettings(
            family=cell.family,
            hidden_size=WIDTH,
            num_layers=cell.num_layers,
            num_heads=4,
            sequence_length=LENGTH,
        )
        models.check_layout(settings, layout)
        config = models.config_of(settings, layout, torch.float32, **cell.more)
        build = models.Chunks(settings, config, VOCABULARY, cell.fused)
        self.cell, self.chunks = cell, build.build()
        self.data_rank = parallel.data_rank()
        self.step_function = steps.step_of(cell.family, CPU)
        self.optimizer: Any = None
        if cell.wrapped:
            self._wrap(config)

    def _wrap(self, config: Any) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        ddp = DistributedDataParallelConfig(
            overlap_grad_reduce=True, use_distributed_optimizer=True
        )
        self.chunks = [DistributedDataParallel(config, ddp, m) for m in self.chunks]
        config.finalize_model_grads_func = finalize_model_grads
        config.no_sync_func = self.chunks[0].no_sync
        settings = OptimizerConfig(
            optimizer="adam", lr=0.01, use_distributed_optimizer=True, clip_grad=0.0
        )
        self.optimizer = get_megatron_optimizer(settings, self.chunks)

    def parameters(self) -> list[nn.Parameter]:
        return [p for chunk in self.chunks for p in chunk.parameters()]

    def schedule(self, step: int, forward_only: bool = False) -> list[float]:
        out = self.run(
            forward_step_func=self.step_function,
            data_iterator=[
                batches(self.cell.family, self.data_rank, step) for _ in self.chunks
            ],
            model=self.chunks,
            num_microbatches=self.cell.num_micro_batches,
            seq_length=LENGTH,
            micro_batch_size=ROWS,
            forward_only=forward_only,
        )
        return [float(one["loss"]) for one in out]

    def step(self, step: int) -> tuple[list[float], list[Tensor]]:
        """Losses and gradients of one optimizer step."""
        if self.cell.evaluate and step == 1:
            with torch.no_grad():
                self.schedule(100, forward_only=True)
            # Without no_grad the graphs are built and thrown away.
            self.schedule(101, forward_only=True)
        if self.optimizer is not None:
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            losses = self.schedule(step)
            grads = [p.main_grad.clone() for p in self.parameters()]
            self.optimizer.step()
            return losses, grads
        losses = self.schedule(step)
        found = [p for p in self.parameters() if p.grad is not None]
        grads = [p.grad.clone() for p in found]
        with torch.no_grad():
            for parameter in found:
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
        return losses, grads


def patched() -> list[Any]:
    """What attach replaces."""
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import random

    discarding = random.CheckpointWithoutOutput
    return [*vars(schedules).items(), *vars(discarding).items()]


def count_prefetches(session: ssdtrain.Session | None) -> list[str]:
    """Names of lanes that were loaded for while a neighbour was waited for."""
    names: list[str] = []
    if session is not None:
        cache = session.cache
        load = cache.prefetch

        def prefetch(lane: Any) -> None:
            names.append(lane.name)
            load(lane)

        cache.prefetch = prefetch  # type: ignore[method-assign]
    return names


def wait_for_writes(session: ssdtrain.Session) -> None:
    """Neither a load nor the end of what nobody asks for overtakes a write, however
    busy the machine."""
    offloader = session.cache.offloader
    load, discard = offloader.load, offloader.discard

    def load_written(transfer: Any, target: Tensor) -> Any:
        offloader.wait_io()
        return load(transfer, target)

    def discard_written(transfer: Any) -> None:
        offloader.wait_io()
        discard(transfer)

    offloader.load = load_written  # type: ignore[method-assign]
    offloader.discard = discard_written  # type: ignore[method-assign]


def train(cell: Cell, settings: dict[str, Any] | None) -> dict[str, Any]:
    training = Training(cell)
    before = [sorted(vars(chunk)) for chunk in training.chunks], patched()
    session = None
    if settings is not None:
        session = ssdtrain.offload(training.chunks, **settings)
    prefetched = count_prefetches(session)
    if session is not None and settings is not None and settings["target"] == "ssd":
        wait_for_writes(session)
    steps = [training.step(number) for number in range(NUM_STEPS)]
    result: dict[str, Any] = {
        "losses": [losses for losses, _ in steps],
        "gradients": [grads for _, grads in steps],
        "weights": [p.detach().clone() for p in training.parameters()],
    }
    if session is not None:
        result["reports"] = [report.as_dict() for report in session.steps]
        result["idle"] = session.cache.is_idle
        result["live"] = session.live_bytes
        result["prefetched"] = len(prefetched)
        session.close()
        after = [sorted(vars(chunk)) for chunk in training.chunks], patched()
        result["restored"] = before == after
    return result


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return same_bits(left, right)


def compare(cell: Cell, out: Path) -> dict[str, Any]:
    theirs = train(cell, None)
    result: dict[str, Any] = {"num_gradients": len(theirs["gradients"][-1])}
    for target in cell.targets:
        settings = {"max_overhead": 0.01, **EVERYTHING, "target": target}
        settings["recompute"] = "auto" if cell.recipes else "off"
        if target == "ssd":
            directory = out / f"ssd{os.environ['RANK']}"
            directory.mkdir(exist_ok=True)
            settings["directory"] = str(directory)
        ours = train(cell, settings)
        result[target] = {
            "losses": ours["losses"] == theirs["losses"],
            "gradients": all(map(same, ours["gradients"], theirs["gradients"])),
            "weights": same(ours["weights"], theirs["weights"]),
            **{
                name: ours[name]
                for name in ("reports", "idle", "live", "restored", "prefetched")
            },
        }
    return result


def captured(cell: Cell, out: Path) -> None:
    """Write the graph of one step, as foresight sees it on this rank."""
    training = Training(cell)
    graph = capture_step(lambda: training.step(0), training.chunks, num_warm=1)
    write_graph(out / f"{cell.name}.graph{dist.get_rank()}.json", graph)


def planned(cell: Cell) -> dict[str, Any]:
    """What the planner decided, after a warm-up, an observed and a planned step."""
    training = Training(cell)
    settings = {
        "max_overhead": 0.01,
        **EVERYTHING,
        "plan": "auto",
        "recompute": "off",
        "target": "host",
    }
    with ssdtrain.offload(training.chunks, **settings) as session:
        for number in range(3):
            training.step(number)
        plan, profile = session.plan, session.profile
        fallbacks = [report.fallbacks for report in session.steps]
    assert plan is not None and profile is not None
    return {
        "orders": repr(sorted(plan.orders.items())),
        "marks_ms": [mark.ms for mark in profile.marks],
        "lanes": len(profile.lanes),
        "fallbacks": fallbacks,
    }


def run(chosen: list[Cell], out: Path) -> dict[str, Any]:
    """Making Megatron's dozens of groups costs more than a cell: once a layout."""
    from ssdtrain.train.mcore import parallel

    results: dict[str, Any] = {}
    for layout, found in groupby(chosen, key=lambda cell: dict(cell.parallel)):
        parallel.start(parallel.Parallel(**layout), 7)
        for cell in found:
            results[cell.name] = compare(cell, out)
            if cell.agreed:
                results[cell.name]["plan"] = planned(cell)
            if cell.agreed or cell.wrapped:
                captured(cell, out)
        parallel.stop()
    return results


def main() -> None:
    out, *only = Path(sys.argv[1]), *sys.argv[2:]
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with cpu_for_cuda():
        results = run([c for c in cells() if not only or c.name in only], out)
    (out / f"rank{rank}.json").write_text(json.dumps(results))
    leave()


if __name__ == "__main__":
    main()
