"""DeepSpeed DeepCompile's pass that moves saved activations to the host, on our blocks.

One rank under ZeRO-3, forward and backward of the engine (its optimizer keeps fp32
weights, so the update is left out of the time). Two columns, in one process each: the
compiled engine alone, and with `compile.offload_activation`, which moves only what a
memory budget asks for: `--memory-gb` is that budget, weights and states included.

    python -m recipes.bench offload.deep_compile
"""

import os
import statistics
from typing import Any

import torch

from recipes.bench.harness.blocks import Blocks
from recipes.bench.harness.cli import Bench
from recipes.bench.harness.processes import answer_of
from recipes.bench.harness.timing import Clock, Peak

NUM_STEPS = 11
"""DeepCompile recompiles at step 5."""
NUM_TIMED_STEPS = 4
COLUMNS = ("engine, eager", "deepcompile", "deepcompile, offload_activation")


def engine_of(column: str, hidden: int, num_layers: int, batch: int) -> Any:
    """A one-rank ZeRO-3 engine over seeded blocks in bf16."""
    import deepspeed

    # Of the CPU, for ranks of one host: its build hangs where a lock was left behind.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    torch.manual_seed(0)
    with torch.device(deepspeed.get_accelerator().current_device_name()):
        model = Blocks(hidden, num_layers).to(torch.bfloat16).train()
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "bf16": {"enabled": True},
        "optimizer": {"type": "SGD", "params": {"lr": 1e-4}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3},
        "compile": {
            "deepcompile": column != COLUMNS[0],
            "offload_activation": column == COLUMNS[2],
        },
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    if column != COLUMNS[0]:
        engine.compile()
    return engine


def measure(engine: Any, batch: int, sequence: int, hidden: int) -> dict[str, Any]:
    """Median time of forward and backward in ms, their peak in GB, losses."""
    device = engine.device
    clock = Clock(device)
    torch.manual_seed(1)
    shape = (batch, sequence, hidden)
    x = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
    times, peaks, losses = [], [], []
    for _ in range(NUM_STEPS):
        memory, begin = Peak(device), clock.mark()
        loss = engine(x)
        engine.backward(loss)
        times.append((begin, clock.mark()))
        peaks.append(memory.most)
        engine.step()
        x.grad = None
        losses.append(loss.item())
    return {
        "forward_backward_ms": statistics.median(
            clock.ms(*marks) for marks in times[-NUM_TIMED_STEPS:]
        ),
        "peak_gb": max(peaks[-NUM_TIMED_STEPS:]) / 1e9,
        "losses": losses,
    }


def main(
    bench: Bench,
    *,
    size: str = "8192x4",
    batch: int = 16,
    sequence: int = 1024,
    memory_gb: float = 1.0,
    limit_s: float = 120,
) -> None:
    """Run the columns that are missing.

    Args:
        size: hidden x layers
    """
    own = {"size": size, "batch": batch, "sequence": sequence, "memory_gb": memory_gb}
    cells = bench.cells(own)
    for name in COLUMNS:
        cells.run(name, answer_of, column, (name, *own.values()), limit_s)


def column(
    name: str, size: str, batch: int, sequence: int, memory_gb: float
) -> dict[str, Any]:
    """One column in this process."""
    os.environ["DS_DC_OFFLOAD_ACT_BUDGET_GB"] = str(memory_gb)
    if torch.cuda.is_available():
        # DeepSpeed's builder reads numbers alone: not "9.0a", which an image may set.
        major, minor = torch.cuda.get_device_capability()
        os.environ["TORCH_CUDA_ARCH_LIST"] = f"{major}.{minor}"
    hidden, num_layers = map(int, size.split("x"))
    engine = engine_of(name, hidden, num_layers, batch)
    return measure(engine, batch, sequence, hidden)
