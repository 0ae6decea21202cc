"""Matrix products at length, which the power limit slows, with the clock that
`nvidia-smi` saw meanwhile."""

import statistics
import subprocess
import time
from typing import Any

import torch

QUERY = "timestamp,clocks.sm,clocks.max.sm"
PERIOD_MS = 50
CHUNK_US = 30_000


class PowerSampler:
    """Samples the clock next to the work; empty where there is no nvidia-smi."""

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
        clock, most = zip(*rows, strict=True)
        return {"sm_mhz": statistics.fmean(clock), "max_sm_mhz": statistics.fmean(most)}


def _present() -> str:
    """What `nvidia-smi` calls the present device: it does not renumber visible ones."""
    if not torch.cuda.is_available():
        return "0"
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def measure_product(size: int, seconds: float) -> dict[str, Any]:
    """A square bf16 product, over and over for `seconds`."""
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
    chunk = max(1, int(CHUNK_US / timed(2)))
    began, series = time.time(), []
    while time.time() - began < seconds:
        series.append(timed(chunk))
    steady = series[len(series) // 3 :]
    return {
        "size": size,
        "steady_us": round(statistics.median(steady), 2),
        "from": began + seconds / 3,
        "to": time.time(),
    }
