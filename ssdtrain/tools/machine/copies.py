"""Measure memory copies: GPU to pinned host and back, GPU to GPU, and host to host."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from ssdtrain.tools.machine.fit import fit_curve
from ssdtrain.tools.machine.links import Link, LinkKind, Sample

KIB = 1024
RUN_SECONDS = 0.05
"""A run this long is well above the clock and one synchronise."""


@dataclass(frozen=True, kw_only=True)
class CopyBudget:
    """What the copy measurements may cost."""

    max_seconds: float = 10.0
    """Seconds for all copies of one device."""
    sizes_bytes: tuple[int, ...] = tuple(4 * KIB * 4**step for step in range(9))
    """4 KiB to 256 MiB; the largest is also the size of each buffer."""

    def __post_init__(self) -> None:
        if len(set(self.sizes_bytes)) < 3 or min(self.sizes_bytes) < 1:
            raise ValueError(
                "a copy budget expects at least three positive sizes, got "
                f"{self.sizes_bytes}"
            )


class Walk:
    """Hands out one piece of a buffer after another, in a circle: the same one twice
    would be in the processor's caches."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._next = 0

    def piece(self, size: int) -> slice:
        """Return where the next `size` bytes are."""
        start = self._next if self._next + size <= self._num_bytes else 0
        self._next = start + size
        return slice(start, self._next)


def measure_host_copy(budget: CopyBudget) -> Link:
    """Pageable host memory to pageable host memory, not caches, by one thread."""
    import torch

    largest = max(budget.sizes_bytes)
    # ones, not empty: untouched pages would all be the one zero page.
    source = torch.ones(largest, dtype=torch.uint8, device="cpu")
    target = torch.ones(largest, dtype=torch.uint8, device="cpu")
    walk = Walk(largest)

    def run(size: int, repeats: int) -> float:
        began = time.perf_counter()
        for _ in range(repeats):
            piece = walk.piece(size)
            target[piece].copy_(source[piece])
        return time.perf_counter() - began

    samples = _samples(run, budget)
    return _link(LinkKind.HOST_COPY, "host", "host", "pageable", samples)


def measure_gpu_copies(device: int, budget: CopyBudget) -> tuple[Link, ...]:
    """D2H, H2D and both at once between one GPU and pinned host memory. Raises
    RuntimeError: the GPU or the pinned memory cannot be had (torch's own text)."""
    import torch

    name = f"cuda:{device}"
    largest = max(budget.sizes_bytes)
    with torch.cuda.device(device):
        out_stream = torch.cuda.Stream()
        in_stream = torch.cuda.Stream()
        gpu = torch.zeros(2, largest, dtype=torch.uint8, device=name)
        host = torch.zeros(2, largest, dtype=torch.uint8, device="cpu", pin_memory=True)

        def out(size: int) -> None:
            with torch.cuda.stream(out_stream):
                host[0, :size].copy_(gpu[0, :size], non_blocking=True)

        def back(size: int) -> None:
            with torch.cuda.stream(in_stream):
                gpu[1, :size].copy_(host[1, :size], non_blocking=True)

        def both(size: int) -> None:
            out(size)
            back(size)

        third = replace(budget, max_seconds=budget.max_seconds / 3)

        def link(kind: LinkKind, issue: Callable[[int], None]) -> Link:
            samples = _samples(_timed(issue, [device]), third)
            ends = ("host", name) if kind is LinkKind.H2D else (name, "host")
            return _link(kind, *ends, "pinned", samples)

        issued = {LinkKind.D2H: out, LinkKind.H2D: back, LinkKind.BOTH: both}
        return tuple(link(kind, issue) for kind, issue in issued.items())


def measure_peer_copy(source: int, target: int, budget: CopyBudget) -> Link:
    """Measure copies between two GPUs; `mode` says whether peer access is there."""
    import torch

    largest = max(budget.sizes_bytes)
    here = torch.zeros(largest, dtype=torch.uint8, device=f"cuda:{source}")
    there = torch.zeros(largest, dtype=torch.uint8, device=f"cuda:{target}")

    def copy(size: int) -> None:
        there[:size].copy_(here[:size], non_blocking=True)

    samples = _samples(_timed(copy, [source, target]), budget)
    direct = torch.cuda.can_device_access_peer(source, target)
    mode = "peer access" if direct else "through the host"
    return _link(LinkKind.PEER, f"cuda:{source}", f"cuda:{target}", mode, samples)


def _timed(
    issue: Callable[[int], None], devices: list[int]
) -> Callable[[int, int], float]:
    """Wall time of `repeats` copies on idle devices until all have landed: it covers
    two streams and two devices."""
    import torch

    def run(size: int, repeats: int) -> float:
        for device in devices:
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(repeats):
            issue(size)
        for device in devices:
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    return run


def _samples(run: Callable[[int, int], float], budget: CopyBudget) -> list[Sample]:
    """Best of three runs a size, each run long enough for the clock."""
    share = budget.max_seconds / len(budget.sizes_bytes)
    samples = []
    for size in sorted(budget.sizes_bytes):
        run(size, 1)  # the first copy pays for page faults and lazy set-up
        # The least: one that was interrupted would make each run a single copy.
        once = max(min(run(size, 1) for _ in range(3)), 1e-7)
        repeats = max(1, min(int(min(share / 4, RUN_SECONDS) / once), 2000))
        seconds = min(run(size, repeats) for _ in range(3)) / repeats
        samples.append(Sample(size_bytes=size, seconds=seconds))
    return samples


def _link(
    kind: LinkKind, source: str, target: str, mode: str, samples: list[Sample]
) -> Link:
    return Link(
        kind=kind,
        source=source,
        target=target,
        depth=1,
        mode=mode,
        samples=tuple(samples),
        curve=fit_curve(samples),
    )
