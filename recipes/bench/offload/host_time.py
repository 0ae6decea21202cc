"""Host time of a saved tensor: what the hooks cost the thread that launches kernels.

    python -m recipes.bench.offload.host_time --budget-s 60

GPT blocks in bf16. A step is timed on the host, from an idle device until forward and
backward are enqueued; the columns' excess over plain PyTorch is divided by the number
of tensors that autograd saves. A GPU that waits for kernels waits for this time.
`--small` runs all columns on a tiny model (a CPU is enough): there the copies of a
moved tensor are made by threads and are in its figure.
"""

import gc
import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

import ssdtrain
from recipes.bench.common.blocks import Blocks, build
from recipes.bench.common.cells import Cells, arguments
from recipes.bench.offload.placement import Size, step

DEFAULT = Size(4096, 8, 8, 1024)
SMALL = Size(64, 8, 2, 16)
COLUMNS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "keep-all": {"plan": "keep-all", "recompute": "off"},
    "recipes": {"plan": "keep-all", "max_overhead": 1.0},
    "offload-all": {"plan": "offload-all", "recompute": "off"},
    "auto": {"plan": "auto", "max_overhead": 0.05},
}
MOST_WARM_UP_STEPS = 16
LEAST_WARM_UP_STEPS = 7
"""Recipes are watched for so long."""


class Steps:
    """Steps of one model, timed on the host."""

    def __init__(self, size: Size, device: torch.device) -> None:
        self.device = device
        self.model: Blocks = build(size.hidden, size.num_layers, device)
        torch.manual_seed(1)
        shape = (size.batch, size.sequence, size.hidden)
        self.x = torch.randn(
            shape, device=device, dtype=torch.bfloat16, requires_grad=True
        )

    def host_ms(self) -> float:
        """One step: ms until forward and backward were enqueued."""
        self.wait()
        began = time.perf_counter()
        self.model(self.x).backward()
        ms = (time.perf_counter() - began) * 1e3
        self.x.grad = None
        step(self.model)
        return ms

    def num_saved(self) -> int:
        """How many tensors autograd saves in a step."""
        found = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal found
            found += 1
            return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held):
            self.model(self.x)
        return found

    def wait(self) -> None:
        """Until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def column(
    size: Size, device: torch.device, settings: dict[str, Any] | None, num_steps: int
) -> dict[str, Any]:
    """Host time of a step under these settings (None: without a session)."""
    steps = Steps(size, device)
    num_saved = steps.num_saved()
    scope: AbstractContextManager[Any] = nullcontext()
    if settings is not None:
        tiny = {"min_bytes": 1, "window_bytes": 1 << 15} if size == SMALL else {}
        scope = ssdtrain.offload(steps.model, target="host", **tiny, **settings)
    with scope as session:
        for number in range(MOST_WARM_UP_STEPS):
            settled = session is None or session.is_settled
            if settled and number >= LEAST_WARM_UP_STEPS:
                break
            steps.host_ms()
        gc.collect()
        found = [steps.host_ms() for _ in range(num_steps)]
        steps.wait()
        result = {
            "host_ms": statistics.median(found),
            "least_ms": min(found),
            "num_saved": num_saved,
        }
        if session is not None:
            report = session.last_step
            result |= {
                name: getattr(report, name)
                for name in ("num_records", "bytes_offloaded", "bytes_recomputed")
            }
    return result


def main() -> None:
    """Run every column that is not in the file yet."""
    parser = arguments(__doc__, 60, "offload/host_time")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = SMALL if options.small else DEFAULT
    if options.small:
        torch.set_num_threads(1)
    settings = {"size": vars(size), "steps": options.steps}
    cells = Cells(options.out, options.budget_s, settings)

    def over_plain(own: dict[str, Any] | None) -> dict[str, Any]:
        found = column(size, device, own, options.steps)
        if own is not None:
            for name, ms in (("us_per_saved", "host_ms"), ("least_us", "least_ms")):
                excess_us = (found[ms] - cells["plain"][ms]) * 1e3
                found[name] = excess_us / found["num_saved"]
        return found

    for name, own in COLUMNS.items():
        cells.run(name, partial(over_plain, own))
        gc.collect()


if __name__ == "__main__":
    main()
