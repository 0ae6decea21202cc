"""What verify mode costs: a step under `checksum` and `shadow`, over the same step off.

GPT blocks in bf16; a plan has one session, whose verifier is exchanged from step to
step: the same plan and the same pinned memory under every mode, and `off` and
`checksum` take turns, so that clocks and temperature are the same for both. `over_off`
is the median of the pairs' ratios. `shadow`, which keeps a copy of all, comes last.
`digest` is the digest alone, in GB/s of the tensor, beside the fastest possible pass
over it (a plain sum of its words).

    python -m recipes.bench.safety.verify --size 12288x2 --budget-s 45
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import ssdtrain
from recipes.bench.common.blocks import Blocks, build
from recipes.bench.common.cells import Cells, arguments
from recipes.bench.offload.placement import Clock, step
from ssdtrain.api import Session
from ssdtrain.cache.digest import Digests, word_bytes
from ssdtrain.cache.verify import open_verifier
from ssdtrain.config import Verify

Left = Callable[[], float]

SETTLING_STEPS = 12
"""At most so many until a plan is followed."""
SHADOW_STEPS = 2
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


class Modes:
    """One session whose steps run under the mode that is asked for."""

    def __init__(self, model: Blocks, x: torch.Tensor, session: Session) -> None:
        self._model, self._x, self._session = model, x, session
        self._clock = Clock(x.device)
        self._verifiers = {
            mode: open_verifier(mode, x.device, [model], session.cache.ledger.counters)
            for mode in Verify
        }
        self.times: dict[Verify, list[float]] = {mode: [] for mode in Verify}
        self._ran: list[Verify] = []

    def run(self, mode: Verify) -> float:
        """Time of one step in ms."""
        self._session.cache.verifier = self._verifiers[mode]
        ms, _ = one_step(self._model, self._x, self._clock)
        self._ran.append(mode)
        return ms

    def settle(self) -> None:
        """Until the plan is followed; kernels of the digest are compiled too."""
        for number in range(SETTLING_STEPS):
            self.run(Verify.OFF)
            if number and self._session.is_settled:
                break
        self.run(Verify.CHECKSUM)
        self.run(Verify.OFF)

    def pairs(self, num: int, left_s: Callable[[], float]) -> None:
        """`off` and `checksum` in turns: one pair at least."""
        order = (Verify.OFF, Verify.CHECKSUM)
        for turn in range(num):
            if turn and left_s() < 0:
                break
            for mode in order if turn % 2 == 0 else order[::-1]:
                self.times[mode].append(self.run(mode))
        if left_s() > 0:
            self.times[Verify.SHADOW] += [
                self.run(Verify.SHADOW) for _ in range(SHADOW_STEPS)
            ]

    def result(self) -> dict[str, Any]:
        """Step times, their ratios, peaks and what was verified."""
        off = self.times[Verify.OFF]
        checked = self.times[Verify.CHECKSUM]
        ratios = [a / b for a, b in zip(checked, off, strict=True)]
        over = {"off": 1.0, "checksum": round(statistics.median(ratios), 4)}
        shadow = self.times[Verify.SHADOW]
        if shadow:
            # The first one allocates its copies.
            over["shadow"] = round(min(shadow) / statistics.median(off), 4)
        # The last step's report is there once another one has begun.
        reports = dict(zip(self._ran, self._session.steps, strict=False))
        ran = {mode: r for mode, r in reports.items() if self.times[mode]}
        last = reports[Verify.CHECKSUM]
        return {
            "step_ms": {m.value: statistics.median(self.times[m]) for m in ran},
            "over_off": over,
            "pair_ratios": [round(ratio, 4) for ratio in ratios],
            "peak_gb": {
                m.value: round(r.allocated.forward_backward_bytes / 1e9, 2)
                for m, r in ran.items()
                if r.allocated is not None
            },
            "num_verified": {m.value: r.num_verified for m, r in ran.items()},
            "verified_gb": round(last.bytes_verified / 1e9, 2),
            "recomputed_gb": round(last.bytes_recomputed / 1e9, 2),
            "offloaded_gb": round(last.bytes_offloaded / 1e9, 2),
            "settled": self._session.is_settled,
        }


def cost(
    model: Blocks, x: torch.Tensor, plan: str, num_pairs: int, left_s: Left
) -> dict[str, Any]:
    """One plan under all modes."""
    with ssdtrain.offload(model, target="host", **PLANS[plan]) as session:
        modes = Modes(model, x, session)
        modes.settle()
        modes.pairs(num_pairs, left_s)
        return modes.result()


def main() -> None:
    """Run the cells that are missing."""
    parser = arguments(__doc__, 45, "safety/verify")
    parser.add_argument("--size", default="12288x2", help="hidden x layers")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--plans", nargs="+", default=list(PLANS), choices=PLANS)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = ("size", "batch", "sequence", "pairs")
    settings = {name: getattr(options, name) for name in names}
    end = time.monotonic() + options.budget_s
    cells = Cells(options.out, options.budget_s, settings)
    num_mib = 768 if device.type == "cuda" else 24
    cells.run("digest", lambda: digest_speed(device, num_mib))
    hidden, num_layers = map(int, options.size.split("x"))
    model = build(hidden, num_layers, device)
    torch.manual_seed(1)
    shape = (options.batch, options.sequence, hidden)
    x = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
    for at, plan in enumerate(options.plans, 1):
        # Each of the plans that are left gets its share of what is left.
        now = time.monotonic()
        until = now + (end - now) / (len(options.plans) + 1 - at)

        def left_s(until: float = until) -> float:
            return until - time.monotonic()

        cells.run(
            f"{options.size}/{plan}",
            lambda p=plan, left=left_s: cost(model, x, p, options.pairs, left),
        )


if __name__ == "__main__":
    main()
