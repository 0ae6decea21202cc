"""Four ranks launch what a search prints: FSDP2, tensor parallel with it, DeepSpeed.

torchrun --nproc-per-node 4 -m recipes.bench search.launch_ranks OUT
"""

import copy
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import torch
from torch import Tensor, distributed, nn

from ssdtrain.tools.search.launch import configurations
from ssdtrain.tools.search.parallel_layout import Job, ParallelLayout

JOB = Job(layers=4, hidden=32, tokens=16, batch=16, gpus=4)
STEPS = 4


def layout(**more: Any) -> ParallelLayout:
    """A layout of four ranks."""
    plain = {"data": 1, "tensor": 1, "pipeline": 1, "zero": 0, "sequences": 2}
    return ParallelLayout(**{**plain, "way": "plain", **more})


def llama() -> nn.Module:
    """A small Llama of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    return LlamaForCausalLM(config)


def by_fsdp2(own: ParallelLayout) -> list[float]:
    """Train a Llama as the printed module splits it, in float64: its losses have to be
    those of the whole model."""
    names: dict[str, Any] = {}
    text = configurations(own, JOB)["fsdp2"]
    for dtype in ("bfloat16", "float32"):
        text = text.replace(f"torch.{dtype}", "torch.float64")
    exec(text, names)
    torch.manual_seed(0)
    whole = llama().double()
    model = copy.deepcopy(whole)
    names["parallelize"](model, "cpu")
    shape = names["MICRO_BATCHES"], names["MICRO_BATCH"], names["TOKENS"]
    ids = torch.randint(0, 64, shape)
    losses = trained(model, ids)
    torch.testing.assert_close(losses, trained(whole, ids), rtol=1e-10, atol=0.0)
    return losses


def trained(model: nn.Module, ids: Tensor) -> list[float]:
    """Losses of some steps, each of all micro-batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(STEPS):
        for words in ids:
            loss = model(input_ids=words, labels=words).loss
            (loss / len(ids)).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def by_deepspeed(own: ParallelLayout) -> list[float]:
    """Train a pipeline of DeepSpeed's with the printed JSON."""
    import deepspeed
    from deepspeed.ops import __compatible_ops__ as compatible_ops
    from deepspeed.pipe import PipelineModule

    # The shared-memory operator is compiled at start.
    compatible_ops["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    layers: list[Any] = [nn.Linear(32, 32) for _ in range(JOB.layers)]
    net = PipelineModule(
        layers,
        num_stages=own.pipeline,
        loss_fn=nn.MSELoss(),
        partition_method="uniform",
    )
    config = json.loads(configurations(own, JOB)["deepspeed"])
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    torch.manual_seed(1)
    x = torch.randn(own.sequences, 32, dtype=torch.bfloat16)

    def batches() -> Any:
        while True:
            yield x, x

    stream = batches()
    return [float(engine.train_batch(stream)) for _ in range(STEPS)]


CASES: Mapping[str, tuple[Callable[[ParallelLayout], list[float]], ParallelLayout]] = {
    "FSDP2": (by_fsdp2, layout(data=4, zero=2)),
    "FSDP2 and tensor parallelism": (by_fsdp2, layout(data=2, tensor=2, zero=3)),
    "FSDP2 and sequence parallelism": (
        by_fsdp2,
        layout(data=2, tensor=2, zero=3, divided=True),
    ),
    "DeepSpeed pipeline": (by_deepspeed, layout(data=2, pipeline=2, zero=1)),
}


def main(out: Path, names: tuple[str, ...] = (), /) -> None:
    """Train the named cases, or all, and write their losses."""
    distributed.init_process_group("gloo")
    found = {}
    for name, (train, own) in CASES.items():
        if names and name not in names:
            continue
        found[name] = losses = train(own)
        if not losses[-1] < losses[0]:
            raise AssertionError(f"{name}: the loss does not fall: {losses}")
    if distributed.get_rank() == 0:
        out.write_text(json.dumps(found, indent=1) + "\n")
    distributed.barrier()
    os._exit(0)  # gloo's threads may abort an interpreter that ends
