"""Matrix products at length, which the power limit slows, against a burst after a
pause; with the clock and power that `nvidia-smi` saw meanwhile."""

import statistics
import subprocess
import time
from typing import Any

import torch

QUERY = "timestamp,clocks.sm,clocks.mem,power.draw,power.limit,clocks.max.sm"
PERIOD_MS = 50
BURST_REPEATS = 4


class PowerSampler:
    """Samples clock and power next to the work; empty where there is no nvidia-smi."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, list[float]]] = []
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "PowerSampler":
        command = ["nvidia-smi", f"--query-gpu={QUERY}", f"--loop-ms={PERIOD_MS}"]
        command += ["--format=csv,noheader,nounits", f"--id={_present()}"]
        try:
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        except OSError:
            self._process = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            return
        self._process.terminate()
        text, _rest = self._process.communicate(timeout=10)
        for line in text.splitlines():
            stamp, *values = [word.strip() for word in line.split(",")]
            try:
                moment = time.strptime(stamp.split(".")[0], "%Y/%m/%d %H:%M:%S")
                seconds = time.mktime(moment) + float("0." + stamp.split(".")[1])
                self.samples.append((seconds, [float(value) for value in values]))
            except (ValueError, IndexError):
                continue  # a line that was cut off

    def between(self, start: float, end: float) -> dict[str, float]:
        """Means of what was sampled between two moments of `time.time()`."""
        rows = [values for at, values in self.samples if start <= at <= end]
        if not rows:
            return {}
        keys = ("sm_mhz", "memory_mhz", "watts", "limit_watts", "max_sm_mhz")
        return {
            key: round(statistics.fmean(column), 1)
            for key, column in zip(keys, zip(*rows, strict=True), strict=True)
        }


def _present() -> str:
    """What `nvidia-smi` calls the present device: it does not renumber visible ones."""
    if not torch.cuda.is_available():
        return "0"
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def measure_product(size: int, seconds: float) -> dict[str, Any]:
    """A square bf16 product: a burst after a pause against `seconds` of them."""
    a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)

    def timed(repeats: int) -> float:
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeats):
            torch.mm(a, b, out=out)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / repeats

    timed(2)
    time.sleep(0.2)
    burst_us = timed(BURST_REPEATS)
    chunk = max(1, int(30_000 / burst_us))
    began, series = time.time(), []
    while time.time() - began < seconds:
        series.append(timed(chunk))
    steady = series[len(series) // 3 :]
    return {
        "kind": "product",
        "size": size,
        "burst_us": round(burst_us, 2),
        "steady_us": round(statistics.median(steady), 2),
        "from": began + seconds / 3,
        "to": time.time(),
    }
