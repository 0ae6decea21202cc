"""DeepSpeed DeepCompile's pass that moves saved activations to the host, on our blocks.

One rank under ZeRO-3, forward and backward of the engine (its optimizer keeps fp32
weights, so the update is left out of the time). Two columns, in one process each: the
compiled engine alone, and with `compile.offload_activation`, which moves only what a
memory budget asks for: `--memory-gb` is that budget, weights and states included.

    python -m recipes.bench.offload.deep_compile
"""

import argparse
import json
import statistics
import subprocess
from typing import Any

import torch

from recipes.bench.common.blocks import Blocks
from recipes.bench.common.cells import (
    Cells,
    arguments,
    child_environment,
    module_command,
)
from recipes.bench.offload.placement import Clock

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
    clock, cuda = Clock(device), device.type == "cuda"
    torch.manual_seed(1)
    shape = (batch, sequence, hidden)
    x = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
    times, peaks, losses = [], [], []
    for _ in range(NUM_STEPS):
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated() if cuda else 0
        begin = clock.mark()
        loss = engine(x)
        engine.backward(loss)
        times.append((begin, clock.mark()))
        peaks.append(torch.cuda.max_memory_allocated() - base if cuda else 0)
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


def child(options: argparse.Namespace) -> None:
    """One column in this process; its JSON is the last line."""
    hidden, num_layers = map(int, options.size.split("x"))
    engine = engine_of(options.child, hidden, num_layers, options.batch)
    found = measure(engine, options.batch, options.sequence, hidden)
    print(json.dumps(found))


def run(options: argparse.Namespace, column: str, port: int) -> dict[str, Any]:
    """A process of one rank; what it said at the end if it failed."""
    environment = {
        **child_environment(),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DS_DC_OFFLOAD_ACT_BUDGET_GB": str(options.memory_gb),
    }
    if torch.cuda.is_available():
        # DeepSpeed's builder reads numbers alone: not "9.0a", which an image may set.
        major, minor = torch.cuda.get_device_capability()
        environment["TORCH_CUDA_ARCH_LIST"] = f"{major}.{minor}"
    command = module_command("recipes.bench.offload.deep_compile", "--child", column)
    for name in ("size", "batch", "sequence"):
        command += [f"--{name}", str(getattr(options, name))]
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=options.limit_s,
    )
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        return {"error": said[-1][:300] if said else f"exit code {done.returncode}"}
    notes = [line for line in done.stdout.splitlines() if "offload_activation" in line]
    return {**json.loads(done.stdout.splitlines()[-1]), "notes": notes[-2:]}


def main() -> None:
    """Run the columns that are missing."""
    parser = arguments(__doc__, 240, "offload/deep_compile")
    parser.add_argument("--size", default="8192x4", help="hidden x layers")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--memory-gb", type=float, default=1.0)
    parser.add_argument("--limit-s", type=float, default=120)
    parser.add_argument("--child", choices=COLUMNS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
        return
    names = ("size", "batch", "sequence", "memory_gb")
    settings = {name: getattr(options, name) for name in names}
    cells = Cells(options.out, options.budget_s, settings)
    for port, column in enumerate(COLUMNS, 29600):
        cells.run(column, lambda c=column, p=port: run(options, c, p))


if __name__ == "__main__":
    main()
