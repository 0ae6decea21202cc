"""What launches a layout: settings of four frameworks."""

import json
from collections.abc import Mapping

from ssdtrain.tools.search.parallel_layout import PLAIN, Job, ParallelLayout

FSDP2 = '''"""Launch with: torchrun --nproc-per-node=GPUS_OF_A_NODE train.py"""
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


def parallelize(model, device_type="cuda"):
    """Split a decoder of transformers; every rank calls it before its optimizer."""
    mesh = init_device_mesh(
        device_type, ({data}, {tensor}), mesh_dim_names=("data", "tensor")
    )
    columns = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    precision = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    for layer in model.model.layers:
        if {tensor} > 1:
            plan = {{"self_attn.o_proj": RowwiseParallel(),
                     "mlp.down_proj": RowwiseParallel()}}
            for name in columns:
                part = "self_attn" if name[1] == "_" else "mlp"
                plan[f"{{part}}.{{name}}"] = ColwiseParallel()
            parallelize_module(layer, mesh["tensor"], plan)
        fully_shard(layer, mesh=mesh["data"], mp_policy=precision,
                    reshard_after_forward={reshard})
    fully_shard(model, mesh=mesh["data"], mp_policy=precision,
                reshard_after_forward={reshard})
    return mesh


MICRO_BATCH, MICRO_BATCHES, TOKENS = {sequences}, {count}, {tokens}
CHECKPOINTING = {again}  # model.gradient_checkpointing_enable()
'''


def torchtitan(layout: ParallelLayout, job: Job) -> str:
    """Return the TOML of torchtitan: what the layout sets."""
    replicate = 1 if layout.zero else layout.data
    lines = [
        "[training]",
        f"seq_len = {job.tokens}",
        f"local_batch_size = {layout.sequences * _local(layout, job)}",
        f"global_batch_size = {job.batch}",
        "",
        "[parallelism]",
        f"data_parallel_replicate_degree = {replicate}",
        f"data_parallel_shard_degree = {layout.data // replicate}",
        f'fsdp_reshard_after_forward = "{_reshard(layout)}"',
        f"tensor_parallel_degree = {layout.tensor}",
        f"pipeline_parallel_degree = {layout.pipeline}",
        'pipeline_parallel_schedule = "1F1B"',
        f"pipeline_parallel_microbatch_size = {layout.sequences}",
        "",
        "[activation_checkpoint]",
        f'mode = "{_torchtitan_mode(layout.way)}"',
    ]
    return "\n".join(lines) + "\n"


def _local(layout: ParallelLayout, job: Job) -> int:
    """Micro-batches of one forward call: a pipeline takes all of them at once."""
    return layout.micro_batches(job.batch) if layout.pipeline > 1 else 1


def _reshard(layout: ParallelLayout) -> str:
    return "always" if layout.zero == 3 else "never"


def _torchtitan_mode(way: str) -> str:
    return {PLAIN: "none", "selective": "selective"}.get(way, "full")


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
    if layout.tensor > 1:
        flags.append("--sequence-parallel")
    if layout.zero == 1:
        flags += ["--use-distributed-optimizer", "--overlap-grad-reduce"]
        flags.append("--overlap-param-gather")
    elif layout.zero:
        sharding = "optim_grads" if layout.zero == 2 else "optim_grads_params"
        flags += ["--use-megatron-fsdp", "--use-distributed-optimizer"]
        flags += [f"--data-parallel-sharding-strategy {sharding}"]
        flags.append("--no-gradient-accumulation-fusion")
    if layout.way == "selective":
        flags.append("--recompute-granularity selective")
    elif layout.way != PLAIN:
        flags += ["--recompute-granularity full", "--recompute-method uniform"]
        flags.append("--recompute-num-layers 1")
    return " \\\n  ".join(flags) + "\n"


def deepspeed(layout: ParallelLayout, job: Job) -> str | None:
    """Return DeepSpeed's JSON; None: it has no such layout (tensor parallelism)."""
    if layout.tensor > 1:
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
    if layout.pipeline > 1 or layout.zero < 2:
        return None
    return FSDP2.format(
        data=layout.data,
        tensor=layout.tensor,
        reshard=layout.zero == 3,
        sequences=layout.sequences,
        count=layout.micro_batches(job.batch),
        tokens=job.tokens,
        again=layout.way != PLAIN,
    )


def configurations(layout: ParallelLayout, job: Job) -> Mapping[str, str]:
    """Return what launches a layout, by framework; those that cannot are left out."""
    found = {
        "torchtitan": torchtitan(layout, job),
        "megatron": megatron(layout, job),
        "deepspeed": deepspeed(layout, job),
        "fsdp2": fsdp2(layout, job),
    }
    return {name: text for name, text in found.items() if text is not None}
