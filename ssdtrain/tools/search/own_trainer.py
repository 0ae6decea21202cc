"""What starts a layout with `ssdtrain train`: a file of settings, and a plan file, for
a GPT with the searched model's layers, width, heads, words and tokens."""

from pathlib import Path
from typing import Any

import torch

from ssdtrain.config import Target
from ssdtrain.plan.plan import Plan
from ssdtrain.plan.prices import Priced, Prices
from ssdtrain.plan.schedule import schedule
from ssdtrain.plan.simulate import simulate
from ssdtrain.plan.timeline import Timeline
from ssdtrain.tools.foresight.device import DeviceCosts
from ssdtrain.tools.foresight.spec import links_of
from ssdtrain.tools.report.estimate import estimate
from ssdtrain.tools.report.fits import CHECKPOINTING, PLAIN
from ssdtrain.tools.search.parallel_layout import Job, ParallelLayout
from ssdtrain.tools.search.stage_costs import OURS, PRICES


def settings_of(
    layout: ParallelLayout, job: Job, *, drives: bool, plan: Path | None = None
) -> dict[str, Any] | None:
    """Return settings for `ssdtrain train --config`; None: it has no such layout.
    `plan`: a file with what `plan_of` gave; None: each rank makes its own plan."""
    engine = _engine(layout)
    if engine is None or job.experts is not None or layout.context > 1:
        return None
    model = {
        "family": "gpt",
        "hidden_size": job.hidden,
        "num_layers": job.layers,
        "num_heads": job.heads,
        "vocab_size": job.words,
        "sequence_length": job.tokens,
        "dropout": 0.0,
    }
    if layout.way == CHECKPOINTING and engine["engine"]["kind"] != "megatron":
        model["checkpointing"] = "non-reentrant"
    offload: Any = "none"
    if layout.way.startswith(OURS):
        # Host memory comes first in either case.
        targets = (target for target in Target if not target.behind.is_staged)
        first = next(target for target in targets if target.behind.is_disk is drives)
        offload = {"target": first.value}
        if plan is None:
            offload |= {"device_memory": "fit", "max_overhead": None}
        else:
            offload["plan"] = str(plan)
    train = {
        "micro_batch_size": layout.sequences,
        "num_micro_batches": layout.micro_batches(job.batch),
        "precision": "bf16",
    }
    return {"model": model, **engine, "train": train, "offload": offload}


def _engine(layout: ParallelLayout) -> dict[str, dict[str, Any]] | None:
    """Return the groups `engine` and `parallel`; None: no engine has the layout."""
    ranks = layout.data * layout.tensor * layout.pipeline
    is_known = layout.way in (PLAIN, CHECKPOINTING) or layout.way.startswith(OURS)
    if ranks == 1:
        return {"engine": {"kind": "plain"}} if is_known else None
    if layout.tensor == layout.chunks == 1:
        stages = layout.pipeline if layout.pipeline > 1 else 0
        own = {"num_ranks": ranks, "num_stages": stages, "zero_stage": layout.zero}
        return {"engine": {"kind": "deepspeed", **own}} if is_known else None
    if layout.zero > 1:
        return None
    parallel: dict[str, Any] = {
        "tensor": layout.tensor,
        "pipeline": layout.pipeline,
        "sequence": layout.divided,
        "distributed_optimizer": layout.zero == 1,
    }
    if layout.chunks > 1:
        parallel["virtual_pipeline"] = layout.chunks
    if layout.way != PLAIN and not layout.way.startswith(OURS):
        full = layout.way == CHECKPOINTING
        parallel["recompute"] = "full" if full else "selective"
    return {"engine": {"kind": "megatron", "num_ranks": ranks}, "parallel": parallel}


def plan_of(
    layout: ParallelLayout, job: Job, device: DeviceCosts, *, drives: bool = False
) -> Plan | None:
    """Return the layout's plan for the trainer's GPT; None: each rank makes its own, as
    with pipelines, tensor parallelism, ZeRO-3 and tiered targets, of which a file
    cannot tell."""
    from ssdtrain.train.models.gpt import Gpt
    from ssdtrain.train.settings import Family, ModelSettings

    whole = layout.tensor * layout.pipeline * layout.context * layout.expert == 1
    if not whole or layout.zero == 3 or drives or not layout.way.startswith(OURS):
        return None
    settings = ModelSettings(
        family=Family.GPT,
        hidden_size=job.hidden,
        num_layers=job.layers,
        num_heads=job.heads,
        sequence_length=job.tokens,
        dropout=0.0,
    )
    with torch.device("meta"):
        model = Gpt(settings, job.words).whole().to(torch.bfloat16).train()
        size = layout.sequences, job.tokens
        ids = torch.zeros(size, dtype=torch.long, device="meta")
        found = estimate(model, lambda: model(ids, ids), links_of(device.spec), device)
    timeline = Timeline(found.profile)
    level = PRICES[int(layout.way.removeprefix(OURS)) - 1]
    placements = Prices(timeline, with_runs=True).placements(Priced(level, 0, 0))
    orders = schedule(timeline, placements)
    prediction = simulate(timeline, orders)
    return Plan(orders=orders, policy=layout.way, prediction=prediction)
