"""Everything that the performance models learn from, in one run on a device.

    python -m recipes.bench.foresight.collect --out times.json --kernels-s 80

Kernels by the random design (resumable), products and copies at length, and training
steps with their host times. `--shapes tiny --device cpu` runs all paths on a CPU.
"""

import argparse
import gc
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from recipes.bench.foresight import subjects
from ssdtrain.foresight import sustained
from ssdtrain.foresight.call import Family
from ssdtrain.foresight.gather import gather
from ssdtrain.foresight.overheads import by_shape, summary
from ssdtrain.foresight.tracing import step_us, traced

COUNTS = {
    Family.PRODUCT: 3000,
    Family.MEMORY: 2400,
    Family.ATTENTION: 1200,
    Family.NORM: 900,
    Family.LOOKUP: 600,
    Family.OPTIMIZER: 200,
    Family.CONVOLUTION: 400,
}


def measured_step(name: str, batch: int, shape: dict[str, int], trace: bool) -> Any:
    subject = subjects.MAKERS[name](batch, **shape)
    step = subjects.training_step(subject)
    cell: dict[str, Any] = {"model": name, "batch": batch, "shape": shape}
    step()  # the optimizer's state
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        cell["before_bytes"] = torch.cuda.memory_allocated()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        cell["peak_bytes"] = torch.cuda.max_memory_allocated()
    cell["from"] = time.time()
    cell["step_us"] = step_us(step, num_warm=1, seconds=1.2)
    cell["to"] = time.time()
    if trace:
        seen = traced(step, 1)
        cell["host"] = summary(seen)
        cell["by_shape"] = by_shape(seen)
    return cell


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kernels-s", type=float, default=80.0)
    parser.add_argument("--steps-s", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shapes", default="explore", choices=sorted(subjects.SHAPES))
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_default_device(device)
    result: dict[str, Any] = {"torch": torch.__version__, "device": "cpu"}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(0)
        result["device"] = properties.name
        result["num_sms"] = properties.multi_processor_count
        result["l2_bytes"] = properties.L2_cache_size

    def save() -> None:
        args.out.write_text(json.dumps(result) + "\n")

    with sustained.Watch() as watch:
        cells = result["steps"] = []
        end = time.monotonic() + args.steps_s
        plan = [
            (name, batch, shape, at)
            for name, (shape, batches) in subjects.SHAPES[args.shapes].items()
            for at, batch in enumerate(batches)
        ]
        for name, batch, shape, at in sorted(plan, key=lambda cell: cell[3] == 1):
            if time.monotonic() > end:
                break
            try:
                cells.append(measured_step(name, batch, shape, at != 1))
            except Exception as error:
                print(f"{name} {batch}: {error}", file=sys.stderr)
                traceback.print_exc()
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            print(f"{time.monotonic() - end:.1f} {name} {batch}", flush=True)
            save()
        if device.type == "cuda":
            runs = sustained.products((1024, 2048, 4096, 8192), 1.2)
            runs.append(sustained.copies(1 << 30, 1.2))
            result["sustained"] = runs
            save()
    for row in [*cells, *result.get("sustained", [])]:
        row["clock"] = watch.between(row.pop("from"), row.pop("to"))
    save()
    lines = args.out.with_suffix(".jsonl")
    gather(COUNTS, lines, device, seed=args.seed, budget_s=args.kernels_s)
    result["kernels"] = [json.loads(line) for line in lines.read_text().splitlines()]
    save()


if __name__ == "__main__":
    main()
