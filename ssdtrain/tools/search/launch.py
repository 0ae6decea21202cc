"""What launches a layout: settings of four frameworks, and ssdtrain's line for them."""

import json
from collections.abc import Mapping
from pathlib import Path
from string import Template

from omegaconf import OmegaConf

from ssdtrain.tools.report.fits import CHECKPOINTING, SELECTIVE
from ssdtrain.tools.search.own_trainer import settings_of
from ssdtrain.tools.search.parallel_layout import Job, ParallelLayout
from ssdtrain.tools.search.stage_costs import OURS

FSDP2 = Template(Path(__file__).with_name("fsdp2.py.txt").read_text(encoding="utf-8"))


def torchtitan(layout: ParallelLayout, job: Job) -> str | None:
    """Return torchtitan's TOML; None: it has no tensor without sequence parallelism."""
    if layout.tensor > 1 and not layout.divided:
        return None
    replicate = 1 if layout.zero else layout.data
    # Micro-batches of one forward call: a pipeline takes all of them at once.
    local = layout.micro_batches(job.batch) if layout.pipeline > 1 else 1
    reshard = "always" if layout.zero == 3 else "never"
    schedule = "Interleaved1F1B" if layout.chunks > 1 else "1F1B"
    mode = {SELECTIVE: "selective", CHECKPOINTING: "full"}.get(layout.way, "none")
    lines = [
        "[training]",
        f"seq_len = {job.tokens}",
        f"local_batch_size = {layout.sequences * local}",
        f"global_batch_size = {job.batch}",
        "",
        "[parallelism]",
        f"data_parallel_replicate_degree = {replicate}",
        f"data_parallel_shard_degree = {layout.data // replicate}",
        f'fsdp_reshard_after_forward = "{reshard}"',
        f"tensor_parallel_degree = {layout.tensor}",
        f"context_parallel_degree = {layout.context}",
        'context_parallel_rotate_method = "allgather"',
        f"pipeline_parallel_degree = {layout.pipeline}",
        f'pipeline_parallel_schedule = "{schedule}"',
        f"pipeline_parallel_microbatch_size = {layout.sequences}",
    ]
    if layout.chunks > 1:
        layers = job.layers // (layout.pipeline * layout.chunks)
        lines.append(f"pipeline_parallel_layers_per_stage = {layers}")
    if job.experts is not None:
        lines += [
            f"expert_parallel_degree = {layout.expert}",
            f"expert_tensor_parallel_degree = {layout.tensor}",
        ]
    lines += ["", "[activation_checkpoint]", f'mode = "{mode}"']
    return "\n".join(lines) + "\n"


def megatron(layout: ParallelLayout, job: Job) -> str:
    """Return Megatron-LM's flags."""
    flags = [
        f"--tensor-model-parallel-size {layout.tensor}",
        f"--pipeline-model-parallel-size {layout.pipeline}",
        f"--micro-batch-size {layout.sequences}",
        f"--global-batch-size {job.batch}",
        f"--seq-length {job.tokens}",
        "--bf16",
    ]
    if layout.divided:
        flags.append("--sequence-parallel")
    if layout.chunks > 1:
        flags.append(f"--num-virtual-stages-per-pipeline-rank {layout.chunks}")
    if layout.context > 1:
        flags.append(f"--context-parallel-size {layout.context}")
        flags.append("--cp-comm-type all_gather")
    if job.experts is not None:
        flags += [
            f"--num-experts {job.experts.number}",
            f"--moe-router-topk {job.experts.each}",
            "--moe-token-dispatcher-type alltoall",
            "--moe-grouped-gemm",
            f"--expert-model-parallel-size {layout.expert}",
            f"--expert-tensor-parallel-size {layout.tensor}",
        ]
    if layout.zero == 1:
        flags += ["--use-distributed-optimizer", "--overlap-grad-reduce"]
        flags.append("--overlap-param-gather")
    elif layout.zero:
        sharding = "optim_grads" if layout.zero == 2 else "optim_grads_params"
        flags += ["--use-megatron-fsdp", "--use-distributed-optimizer"]
        flags += [f"--data-parallel-sharding-strategy {sharding}"]
        flags.append("--no-gradient-accumulation-fusion")
    if layout.way == SELECTIVE:
        flags.append("--recompute-granularity selective")
    elif layout.way == CHECKPOINTING:
        flags += ["--recompute-granularity full", "--recompute-method uniform"]
        flags.append("--recompute-num-layers 1")
    return " \\\n  ".join(flags) + "\n"


def deepspeed(layout: ParallelLayout, job: Job) -> str | None:
    """Return DeepSpeed's JSON; None: its file names no such layout."""
    if layout.tensor * layout.context * layout.expert * layout.chunks > 1:
        return None
    values = {
        "train_batch_size": job.batch,
        "train_micro_batch_size_per_gpu": layout.sequences,
        "gradient_accumulation_steps": layout.micro_batches(job.batch),
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": layout.zero, "overlap_comm": True},
    }
    return json.dumps(values, indent=2) + "\n"


def fsdp2(layout: ParallelLayout, job: Job) -> str | None:
    """Return Python for FSDP2 and tensor parallelism; None: it has no such layout."""
    others = layout.pipeline * layout.context * layout.expert
    if others > 1 or layout.zero < 2:
        return None
    return FSDP2.substitute(
        data=layout.data,
        tensor=layout.tensor,
        divided=layout.divided,
        reshard=layout.zero == 3,
        sequences=layout.sequences,
        count=layout.micro_batches(job.batch),
        tokens=job.tokens,
        again=layout.way == CHECKPOINTING,
    )


def ssdtrain(layout: ParallelLayout, drives: bool) -> str | None:
    """Return the line that lets ssdtrain place the activations; None: it is not asked.
    `layout`: what is launched; `drives`: whether some of them go to SSDs."""
    if not layout.way.startswith(OURS):
        return None
    where = 'target="tiered", directory=DIRECTORY' if drives else 'target="host"'
    call = f'session = ssdtrain.offload(model, device_memory="fit", {where})'
    return f"import ssdtrain\n\n{call}  # before the first step\n"


def trainer(
    layout: ParallelLayout, job: Job, drives: bool, plan: Path | None
) -> str | None:
    """Return the YAML of `ssdtrain train`; None: it has no such layout."""
    settings = settings_of(layout, job, drives=drives, plan=plan)
    return None if settings is None else OmegaConf.to_yaml(OmegaConf.create(settings))


def configurations(
    layout: ParallelLayout, job: Job, *, drives: bool = False, plan: Path | None = None
) -> Mapping[str, str]:
    """Return what launches a layout, by framework; those that cannot are left out.
    `drives`: activations go to SSDs; `plan`: of `own_trainer.plan_of`, in a file."""
    found = {
        "torchtitan": torchtitan(layout, job),
        "megatron": megatron(layout, job),
        "deepspeed": deepspeed(layout, job),
        "fsdp2": fsdp2(layout, job),
        "ssdtrain": ssdtrain(layout, drives),
        "ssdtrain train": trainer(layout, job, drives, plan),
    }
    return {name: text for name, text in found.items() if text is not None}
