"""What verify mode costs: a step under `checksum` and `shadow`, over the same step off.

GPT blocks in bf16, one process, one model; the columns take turns round by round, so
that clocks and temperature are the same for all. `digest` is the digest alone, in GB/s
of the tensor, beside the fastest possible pass over it (a plain sum of its words).

    python recipes/bench/verify.py --size 12288x3 --budget-s 60
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpt_block import Blocks, build
from harness import RESULTS, Cells
from placement import Clock, step

import ssdtrain
from ssdtrain.cache.digest import Digests, word_bytes

MODES = ("off", "checksum", "shadow")
PLANS: dict[str, dict[str, Any]] = {
    "offload-all": {"plan": "offload-all", "recompute": "off"},
    "recipes + auto": {"plan": "auto", "recompute": "auto"},
    "keep-all": {"plan": "keep-all", "recompute": "off"},
}


def digest_speed(device: torch.device, num_mib: int) -> dict[str, Any]:
    """GB/s of the digest: a dense tensor, a slice of a fused projection, the bound."""
    digests, clock = Digests(device), Clock(device)
    rows = num_mib * 1024 * 1024 // 2 // (3 * 4096)
    fused = torch.randn(rows, 3, 4096, device=device).to(torch.bfloat16)
    words = fused.view(-1).view(torch.int64)

    def gb_per_s(call: Callable[[], Any], num_bytes: int) -> float:
        times = []
        for _ in range(8):
            start = clock.mark()
            call()
            times.append(clock.ms(start, clock.mark()))
        return round(num_bytes / 1e6 / statistics.median(times[2:]), 1)

    query = fused[:, 0]
    return {
        "sum_gb_per_s": gb_per_s(lambda: words.sum(), words.nbytes),
        "dense_gb_per_s": gb_per_s(
            lambda: digests.of(fused, word_bytes(fused)), fused.nbytes
        ),
        "rows_gb_per_s": gb_per_s(
            lambda: digests.of(query, word_bytes(query)), query.nbytes
        ),
    }


def one_step(model: Blocks, x: torch.Tensor, clock: Clock) -> tuple[float, float]:
    """Time of forward, backward and update in ms, and the loss."""
    begin = clock.mark()
    loss = model(x)
    loss.backward()
    x.grad = None
    step(model)
    end = clock.mark()
    return clock.ms(begin, end), loss.item()


def cost(
    options: argparse.Namespace, device: torch.device, plan: str
) -> dict[str, Any]:
    """One plan: all modes in turn, `--rounds` times."""
    hidden, num_layers = map(int, options.size.split("x"))
    model, clock = build(hidden, num_layers, device), Clock(device)
    torch.manual_seed(1)
    shape = (options.batch, options.sequence, hidden)
    x = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    peaks: dict[str, float] = {}
    verified: dict[str, int] = {}
    for turn in range(options.rounds):
        for mode in MODES if turn < 2 else MODES[:2]:
            settings = {"target": "host", **PLANS[plan], "verify": mode}
            with ssdtrain.offload(model, **settings) as session:
                one_step(model, x, clock)
                times[mode] += [one_step(model, x, clock)[0] for _ in range(3)]
                report = session.last_step
                verified[mode] = report.num_verified
                if report.allocated is not None:
                    peak = report.allocated.forward_backward_bytes / 1e9
                    peaks[mode] = round(peak, 2)
    off = statistics.median(times["off"])
    return {
        "step_ms": {mode: statistics.median(times[mode]) for mode in MODES},
        "over_off": {m: round(statistics.median(times[m]) / off, 4) for m in MODES},
        "peak_gb": peaks,
        "num_verified": verified,
        "recomputed_gb": round(report.bytes_recomputed / 1e9, 2),
        "offloaded_gb": round(report.bytes_offloaded / 1e9, 2),
    }


def main() -> None:
    """Run the cells that are missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--size", default="12288x3", help="hidden x layers")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--plans", nargs="+", default=list(PLANS), choices=PLANS)
    parser.add_argument("--budget-s", type=float, default=60)
    parser.add_argument("--out", type=Path, default=RESULTS / "verify.json")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = ("size", "batch", "sequence", "rounds")
    settings = {name: getattr(options, name) for name in names}
    cells = Cells(options.out, options.budget_s, settings)
    num_mib = 768 if device.type == "cuda" else 24
    cells.run("digest", lambda: digest_speed(device, num_mib))
    for plan in options.plans:
        cells.run(f"{options.size}/{plan}", lambda p=plan: cost(options, device, p))


if __name__ == "__main__":
    main()
