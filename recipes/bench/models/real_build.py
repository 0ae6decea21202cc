"""The models of `real_models`, built, spread and compiled as their rows say."""

from typing import Any

import torch
from torch import nn

from recipes.bench.models.real_catalogue import Mode, Row, Tuned
from recipes.bench.models.stock import fuse_the_loss, shape_of, with_lora


def build(row: Row, device: torch.device, most_tokens: int) -> nn.Module:
    """The model on its device, ready to be trained, random weights of a fixed seed."""
    shape = shape_of(row.model)
    if device.type == "cuda":
        fuse_the_loss(shape.fused)
    dtype = torch.float32 if row.mode is Mode.FSDP2 else torch.bfloat16
    config = shape.config(most_tokens, depth=shape.depth)
    model: Any = shape.model(config, device, dtype=dtype, attn_implementation="sdpa")
    layers = model.model.layers
    if row.tuned is Tuned.LORA:
        model = with_lora(model)
    if row.mode is Mode.LAYERS:
        for layer in layers:
            layer.compile()
    if row.mode.has_mesh:
        spread(model, layers, row.mode, device)
    return model  # type: ignore[no-any-return]


def spread(
    model: nn.Module, layers: nn.ModuleList, mode: Mode, device: torch.device
) -> None:
    """Over all ranks."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    if mode is Mode.TENSOR:
        divide(layers, mesh)
    else:
        shard(model, layers, mesh)


def shard(model: nn.Module, layers: nn.ModuleList, mesh: Any) -> None:
    """FSDP2 by layer: bf16 compute, fp32 masters and reductions."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def divide(layers: nn.ModuleList, mesh: Any) -> None:
    """Tensor parallel layers, sequence parallel norms; what is around the layers sees
    whole tensors."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    parts, whole = Shard(1), Replicate()
    products = {
        f"self_attn.{name}_proj": ColwiseParallel() for name in ("q", "k", "v")
    } | {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    for layer in layers:
        own = {
            "input_layernorm": SequenceParallel(),
            "post_attention_layernorm": SequenceParallel(),
            "self_attn": PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": parts},
                desired_input_kwarg_layouts={"hidden_states": whole},
            ),
            "mlp": PrepareModuleInput(
                input_layouts=(parts,), desired_input_layouts=(whole,)
            ),
            "self_attn.o_proj": RowwiseParallel(output_layouts=parts),
            "mlp.down_proj": RowwiseParallel(output_layouts=parts),
        }
        parallelize_module(layer, mesh, products | own)
    first = PrepareModuleInput(
        input_layouts=whole, desired_input_layouts=parts, use_local_output=True
    )
    last = PrepareModuleOutput(output_layouts=parts, desired_output_layouts=whole)
    parallelize_module(layers[0], mesh, first)
    parallelize_module(layers[-1], mesh, last)
