"""Where activations live: step time and activation peak of every way to place them.

GPT blocks in bf16; a step is forward, backward and SGD. All columns run in one
process on one device with the same model code and seeds. Peak is the most bytes
allocated in forward and backward above the level before the step (weights and
gradients excluded). Where ssdtrain plans, steps are timed once nothing settles any
more, or `--settle-s` are over: the cell says which. The link bound of a column that
moves everything is max(t_forward, bytes / D2H) + max(t_backward, bytes / H2D), each
measured here.

    python -m recipes.bench.offload.placement --sizes 8192x4 12288x3 --budget-s 400
    python -m recipes.bench.offload.placement --rivals --sizes 8192x4 --out rivals.json
"""

import contextlib
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import ssdtrain
from recipes.bench.common.blocks import Blocks, build
from recipes.bench.common.cells import Cells, arguments
from recipes.bench.offload import rivals as rivals

Forward = Callable[[torch.Tensor], torch.Tensor]
BESIDE_RIVALS = ("keep", "full recompute", "trl", "ours recipes + auto")
"""Columns that `--rivals` runs beside the rivals', in the same process."""


@dataclass(frozen=True)
class Size:
    """One model size and its input."""

    hidden: int
    num_layers: int
    batch: int
    sequence: int

    @property
    def name(self) -> str:
        """Such as 8192x4."""
        return f"{self.hidden}x{self.num_layers}"


class Clock:
    """Marks on the device's own time line (wall time without a GPU)."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def mark(self) -> Any:
        """A point in time, in compute order."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, start: Any, end: Any) -> float:
        """Between two marks, in ms."""
        if not self._cuda:
            return float(end - start) * 1e3
        end.synchronize()
        return float(start.elapsed_time(end))

    def times(self, steps: Sequence[Sequence[Any]]) -> dict[str, float]:
        """Medians, each step marked at begin, behind forward, behind backward, end."""
        times = [[self.ms(a, b) for a, b in itertools.pairwise(s)] for s in steps]
        forward_ms, backward_ms, _ = map(statistics.median, zip(*times, strict=True))
        return {
            "step_ms": statistics.median(sum(parts) for parts in times),
            "forward_ms": forward_ms,
            "backward_ms": backward_ms,
        }


@contextlib.contextmanager
def plain(model: Blocks) -> Iterator[Forward]:
    """No placement at all."""
    yield model


@contextlib.contextmanager
def recompute(model: Blocks) -> Iterator[Forward]:
    """Every block checkpointed."""
    model.recompute = True
    try:
        yield model
    finally:
        model.recompute = False


@contextlib.contextmanager
def save_on_cpu(model: Blocks) -> Iterator[Forward]:
    """torch's own hook, pinned."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            return model(x)

    yield forward


@contextlib.contextmanager
def trl(model: Blocks) -> Iterator[Forward]:
    """TRL's OffloadActivations (torchtune's lineage), its defaults."""
    from accelerate import PartialState
    from trl.models.activation_offloading import OffloadActivations

    PartialState()  # TRL's logger asks for it

    def forward(x: torch.Tensor) -> torch.Tensor:
        with OffloadActivations():
            return model(x)

    yield forward


def ours(**settings: Any) -> Callable[[Blocks], Any]:
    """ssdtrain with these settings."""

    @contextlib.contextmanager
    def column(model: Blocks) -> Iterator[Forward]:
        with ssdtrain.offload(model, **settings) as session:
            column.session = session  # type: ignore[attr-defined]
            yield model

    return column


def columns(size: Size, grid: list[str]) -> dict[str, Callable[[Blocks], Any]]:
    """Every way to place activations, the baseline first.

    `grid` adds columns "window:prefetch", each in multiples of the largest tensor.
    """
    host = {"target": "host", "recompute": "off"}
    largest = 2 * size.batch * size.sequence * 4 * size.hidden
    found = {
        "keep": plain,
        "ours keep-all": ours(**host, plan="keep-all"),
        "ours offload-all": ours(**host, plan="offload-all"),
        "full recompute": recompute,
        "trl": trl,
        "ours auto": ours(**host, plan="auto"),
        "ours recipes": ours(target="host", plan="keep-all"),
        "ours recipes + offload-all": ours(target="host", plan="offload-all"),
        "ours recipes + auto": ours(target="host", plan="auto"),
    }
    found["save_on_cpu"] = save_on_cpu  # the slowest last
    for point in grid:
        window, prefetch = (int(float(part) * largest) for part in point.split(":"))
        found[f"ours offload-all {point}"] = ours(
            **host,
            plan="offload-all",
            window_bytes=window,
            prefetch_bytes=prefetch,
        )
    return found


SETTLE_S = 40.0
"""A session may take so long until its steps are timed."""


def settling(session: Any, limit_s: float) -> Callable[[], bool]:
    """Whether steps of a session are not to be timed yet: those that are observed or
    measured come before its first plan, and those of a plan are judged. None: there is
    no session, and nothing to wait for."""
    until = time.monotonic() + limit_s
    return lambda: (
        session is not None and not session.is_settled and time.monotonic() < until
    )


def measure(
    model: Blocks,
    forward: Forward,
    size: Size,
    num_steps: int,
    settles: Callable[[], bool] = bool,
) -> dict[str, Any]:
    """Median step, forward and backward time, peaks and losses.

    Args:
        settles: asked before each step whether it is one more that is not timed.
    """
    device = next(model.parameters()).device
    cuda, clock = device.type == "cuda", Clock(device)
    around = getattr(forward, "around", contextlib.nullcontext())
    torch.manual_seed(1)
    shape = (size.batch, size.sequence, size.hidden)
    x = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
    marks, losses, peaks, starts = [], [], [], []
    num_left = num_steps
    while num_left:
        num_left -= not settles()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_allocated()
        begin = clock.mark()
        with around:
            loss = forward(x)
            middle = clock.mark()
            if cuda:
                starts.append(torch.cuda.memory_allocated() - base)
            loss.backward()
            behind = clock.mark()
        if cuda:
            peaks.append(torch.cuda.max_memory_allocated() - base)
        x.grad = None
        step(model)
        marks.append((begin, middle, behind, clock.mark()))
        losses.append(loss.detach())
        del loss
    return {
        **clock.times(marks[-num_steps:][max(1, num_steps // 3) :]),
        "peak_gb": max(peaks[-num_steps:][1:], default=0) / 1e9,
        "backward_start_gb": max(starts[-num_steps:][1:], default=0) / 1e9,
        # Of steps that every column has.
        "losses": [loss.item() for loss in losses[:num_steps]],
        "num_warm_up": len(marks) - num_steps,
    }


@torch.no_grad()
def step(model: Blocks) -> None:
    """SGD, gradients kept allocated so that they never count as activations."""
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    torch._foreach_add_(parameters, gradients, alpha=-1e-3)
    torch._foreach_zero_(gradients)


def link(device: torch.device, num_bytes: int) -> dict[str, Any]:
    """Pinned copies of `num_bytes` in both directions, GB/s, medians of 5."""
    clock = Clock(device)
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    result = {}
    for name, source, target in (("d2h", there, host), ("h2d", host, there)):
        times = []
        for _ in range(6):
            start = clock.mark()
            target.copy_(source, non_blocking=True)
            times.append(clock.ms(start, clock.mark()))
        result[f"{name}_gb_per_s"] = num_bytes / 1e6 / statistics.median(times[1:])
    return result


def run_column(
    size: Size,
    column: Callable[[Blocks], Any],
    device: torch.device,
    num_steps: int,
    settle_s: float = SETTLE_S,
) -> dict[str, Any]:
    """One cell: a fresh model under one column."""
    model = build(size.hidden, size.num_layers, device)
    try:
        with column(model) as forward:
            session = getattr(column, "session", None)
            settles = settling(session, settle_s)
            result = measure(model, forward, size, num_steps, settles)
            if session is not None:
                result["settled"] = session.is_settled
                report = session.last_step
                result["report"] = None if report is None else report.as_dict()
    finally:
        if hasattr(column, "session"):
            del column.session
        del model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return result


def summarize(cells: Cells, sizes: list[Size]) -> None:
    """Ratios to keep, and to the link bound where everything was moved."""
    link_cell = cells["link"]
    for size in sizes:
        keep = cells.data["cells"].get(f"{size.name}/keep")
        if keep is None or "error" in keep:
            continue
        for name, cell in cells.data["cells"].items():
            if not name.startswith(f"{size.name}/") or "error" in cell:
                continue
            cell["step_ratio"] = cell["step_ms"] / keep["step_ms"]
            cell["losses_equal"] = cell["losses"] == keep["losses"]
            report = cell.get("report")
            if report and report["bytes_offloaded"]:
                gb = report["bytes_offloaded"] / 1e9
                out = max(keep["forward_ms"], gb / link_cell["d2h_gb_per_s"] * 1e3)
                back = max(keep["backward_ms"], gb / link_cell["h2d_gb_per_s"] * 1e3)
                rest = keep["step_ms"] - keep["forward_ms"] - keep["backward_ms"]
                cell["link_bound_ms"] = out + back + rest
                cell["over_link_bound"] = cell["step_ms"] / cell["link_bound_ms"]
    cells.save()


def table(cells: Cells) -> None:
    """Print what was measured."""
    print(f"{'cell':38} {'step':>7} {'peak GB':>8} {'start':>6} {'bound':>6} equal")
    for name, cell in cells.data["cells"].items():
        if "step_ratio" in cell:
            print(
                f"{name:38} {cell['step_ratio']:6.3f}x {cell['peak_gb']:8.2f} "
                f"{cell['backward_start_gb']:6.2f} "
                f"{cell.get('over_link_bound', 0):6.3f} {cell['losses_equal']}"
            )
        elif "error" in cell:
            print(f"{name:38} {cell['error'][:80]}")


def main() -> None:
    """Run the cells that are missing."""
    parser = arguments(__doc__, 600, "offload/placement")
    parser.add_argument("--sizes", nargs="+", default=["8192x4", "12288x3", "16384x2"])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--columns", nargs="+", help="only these")
    parser.add_argument("--settle-s", type=float, default=SETTLE_S, help="at most")
    parser.add_argument("--grid", nargs="*", default=[], help="window:prefetch")
    parser.add_argument("--rivals", action="store_true", help="ours against rivals")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = [
        Size(*map(int, text.split("x")), options.batch, options.sequence)
        for text in options.sizes
    ]
    settings = {"batch": options.batch, "sequence": options.sequence, "dtype": "bf16"}
    cells = Cells(options.out, options.budget_s, settings)
    cells.run("link", lambda: link(device, 2**30 if device.type == "cuda" else 2**24))
    only = (*BESIDE_RIVALS, *rivals.columns()) if options.rivals else options.columns
    for size in sizes:
        found = columns(size, options.grid)
        for name, column in {**found, **rivals.columns()}.items():
            wanted = name in found if only is None else name in only
            if wanted or name.split()[-1] in options.grid:
                cells.run(
                    f"{size.name}/{name}",
                    lambda s=size, c=column: run_column(
                        s, c, device, options.steps, options.settle_s
                    ),
                )
    summarize(cells, sizes)
    table(cells)


if __name__ == "__main__":
    main()
