"""What trains under gradient checkpointing trains under ssdtrain, in as much memory.

Each case is trained by the stock loop with `gradient_checkpointing_enable()`, in a
process of its own; the most that its allocator reserved, and 3 %, is what ours may
reserve in theirs (`set_per_process_memory_fraction`), without checkpointing: with the
defaults, and with `device_memory="fit"`. Ours goes on until a plan has been followed
for some steps and nothing settles any more, or its seconds are over. A case counts only
if it came that far; one that no plan reached in time is unfinished. Only memory is
compared, so two cases run beside one another on each GPU; a fraction of one does not
see the other.

    python -m recipes.bench models.fits --budget-s 400
    python -m recipes.bench models.fits --cases qwen3-4b:6/full/1x8k --columns ours
    python -m recipes.bench models.fits --device cpu --tiny    # every path, no limit
"""

import contextlib
import gc
import itertools
import os
import statistics
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from recipes.bench.harness.cells import Cells
from recipes.bench.harness.cli import Bench, UsageError
from recipes.bench.harness.processes import answer_of, on_gpus, visible_gpus
from recipes.bench.harness.timing import Clock
from recipes.bench.models.stock import Case, build, case_of, inputs_of, smaller

CASES = (
    "qwen3-1.7b:8/full/1x8k",
    "qwen3-1.7b:8/full/4x2k",
    "qwen3-1.7b:8/lora/1x16k",
    "qwen3-4b:6/full/1x8k",
    "qwen3-4b:6/full/1x16k",
    "qwen3-4b:3/lora/1x32k",
    "qwen3-8b:4/full/1x4k",
    "qwen3-8b:3/lora/1x16k",
    "mistral-7b:4/full/1x8k",
    "mistral-7b:3/lora/2x8k",
    "llama-1b:8/full/1x8k",
    "llama-8b:6/lora/4x2k",
    "gemma2-2b:6/full/1x4k",
    "phi3-mini:6/full/1x8k",
    "olmo2-7b:4/full/1x4k",
    "moe:6/full/1x8k",
    "gpt2-large:18/full/8x1k",
    "t5-large:8/full/8x1k",
    "vit-large:24/full/128x1",
    "whisper-large:6/full/16x256",
)
ROOM = 1.03
"""Of what checkpointing reserved."""
COLUMNS: dict[str, dict[str, Any]] = {
    "gc": {},
    "ours": {},
    "ours fit": {"device_memory": "fit"},
}
"""By name: settings of `ssdtrain.offload`."""
NUM_GC_STEPS = 5
LEAST_PLANNED_STEPS = 8
"""Under a plan: its tables are made in the first, and hooks are timed in the third."""
MANY_PLANNED_STEPS = 24
"""In which one that leaves the allocator too little is seen, and another follows."""
MOST_STEPS = 120
TOO_LONG = "took too long"
"""Error of a process that had to be ended."""
START_S = 8.0
"""Of a process, at most: imports, the device, the model."""
NUM_LAST = 3
"""Steps that show what goes on."""
LEAST_SECONDS = 4.0
"""With less there is no use in starting one."""
PRELOAD = ["torch", "transformers", "recipes.bench.models.stock", "peft"]
PRELOAD += [
    f"transformers.models.{name}.modeling_{name}"
    for name in "qwen3 qwen3_moe mistral llama gemma2 phi3 olmo2 gpt2 t5 vit".split()
]
PRELOAD += ["transformers.models.whisper.modeling_whisper"]


@dataclass(frozen=True, kw_only=True)
class Run:
    """What all processes share.

    seconds: of the steps of one of ours, where a plan comes in them. most_seconds:
    where it comes late. num_planned: steps under plans, though it settles later.
    limit_bytes: that it may reserve. gpu: which one; "": any.
    """

    device: str = "cuda"
    tiny: bool = False
    seconds: float = 6.0
    most_seconds: float = 20.0
    num_planned: int = LEAST_PLANNED_STEPS
    limit_bytes: int | None = None
    gpu: str = ""


class Memory:
    """What the allocator reserved and gave out, most of all steps."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self.reserved_bytes = self.allocated_bytes = 0
        self._num_emptied: list[int] = []
        """Behind each step."""

    def look(self) -> None:
        """Behind every step: ours starts the maxima again while it observes."""
        if not self._is_cuda:
            return
        reserved = torch.cuda.max_memory_reserved()
        allocated = torch.cuda.max_memory_allocated()
        self.reserved_bytes = max(self.reserved_bytes, reserved)
        self.allocated_bytes = max(self.allocated_bytes, allocated)
        self._num_emptied.append(torch.cuda.memory_stats().get("num_alloc_retries", 0))

    def told(self) -> dict[str, Any]:
        """For the results; with how often the allocator had to empty its cache."""
        found: dict[str, Any] = {
            "reserved_gb": self.reserved_bytes / 1e9,
            "allocated_gb": self.allocated_bytes / 1e9,
        }
        if self._is_cuda:
            stats = torch.cuda.memory_stats()
            counts = [0, *self._num_emptied, stats.get("num_alloc_retries", 0)]
            found["num_emptied"] = counts[-1]
            pairs = enumerate(itertools.pairwise(counts))
            found["emptied_in"] = [step for step, (was, now) in pairs if now > was]
            torn_bytes = stats.get("inactive_split_bytes.all.peak", 0)
            found["torn_gb"] = torn_bytes / 1e9
        return found


class Loop:
    """The loop that users write: forward, backward, optimizer, no gradients left."""

    def __init__(self, case: Case, run: Run) -> None:
        case = smaller(case) if run.tiny else case
        self.device = torch.device(run.device)
        self.model = build(case, self.device, run.tiny)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
        self._inputs = inputs_of(case, self.model, self.device)
        self.memory, self._clock = Memory(self.device), Clock(self.device)
        self.losses: list[Tensor] = []
        self.marks: list[Any] = [self._clock.mark()]

    def step(self) -> None:
        """One of them; nothing in it waits for the device."""
        loss = self.model(**self._inputs).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.losses.append(loss.detach())
        self.marks.append(self._clock.mark())
        self.memory.look()

    def steps_ms(self) -> list[float]:
        """Of all steps."""
        return self._clock.between(self.marks)


def checkpointed(model: nn.Module) -> None:
    """As users do it; without reentrance, which needs an input with gradients."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]


def take_gpu(run: Run) -> None:
    """See no other GPU than the run's; nothing may be initialized yet."""
    if run.gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = run.gpu


@contextlib.contextmanager
def limited(run: Run) -> Iterator[None]:
    """Let this process reserve no more than the limit."""
    if run.limit_bytes is not None and run.device == "cuda":
        all_bytes = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(run.limit_bytes / all_bytes)
    yield


def measure(name: str, column: str, run: Run) -> dict[str, Any]:
    """Train one case under one column."""
    take_gpu(run)
    with limited(run):
        began = time.perf_counter()
        loop = Loop(case_of(name), run)
        found: dict[str, Any] = {"build_s": round(time.perf_counter() - began, 2)}
        if column == "gc":
            checkpointed(loop.model)
            for _ in range(NUM_GC_STEPS):
                loop.step()
            return found | told(loop)
        return found | ours(loop, COLUMNS[column], run)


def ours(loop: Loop, settings: dict[str, Any], run: Run) -> dict[str, Any]:
    """Steps under ssdtrain: how far they came, and what ended them if anything did."""
    import ssdtrain

    if run.tiny:
        settings = {**settings, "min_bytes": 1}
    session = ssdtrain.offload(loop.model, **settings)
    found = train(loop, session, run)
    if "error" not in found:
        session.close()
    return found | told(loop)


def train(loop: Loop, session: Any, run: Run) -> dict[str, Any]:
    """Steps until a plan is followed and settled, or the seconds are over."""
    found: dict[str, Any] = {}
    began = time.perf_counter()
    planned = num_plans = 0
    planned_from: int | None = None
    last: Any = None
    try:
        while len(loop.losses) < MOST_STEPS:
            spent = time.perf_counter() - began
            is_late = spent >= run.seconds and planned >= run.num_planned
            if planned >= LEAST_PLANNED_STEPS and (is_late or session.is_settled):
                break
            if spent >= run.most_seconds:
                break
            loop.step()
            plan = session.plan
            planned += plan is not None
            if plan is not None and plan is not last:
                num_plans, last = num_plans + 1, plan
                planned_from = planned_from or len(loop.losses)
    except Exception as error:  # whatever it is, it is the result
        found["error"] = f"{type(error).__name__}: {error}"[:2000]
    found |= {
        "num_planned": planned,
        "num_plans": num_plans,
        "planned_from": planned_from,
        "settled": session.is_settled,
        "segments": session.segments,
        "refused": dict(list(session.regions_refused.items())[:2]),
    }
    last = session.plan or last  # an error ends the first step of one, too
    if last is not None and last.prediction is not None:
        found["policy"] = last.policy
        found["predicted_gb"] = last.prediction.peak_bytes / 1e9
        found["base_gb"] = (session.profile.base_bytes if session.profile else 0) / 1e9
    if "error" not in found:
        report = session.last_step
        found["fallbacks"] = {} if report is None else report.fallbacks
    return found


def told(loop: Loop) -> dict[str, Any]:
    """Steps, memory, and what the last steps took."""
    found: dict[str, Any] = {"num_steps": len(loop.losses), **loop.memory.told()}
    steps_ms = loop.steps_ms()
    if len(steps_ms) > 2:
        found["step_ms"] = statistics.median(steps_ms[-3:])
    found["losses"] = [loss.item() for loss in loop.losses[:NUM_GC_STEPS]]
    gc.collect()
    return found


def run_case(name: str, columns: list[str], run: Run, cells: Cells) -> None:
    """Checkpointing first: it says what ours may reserve."""
    limit_bytes: int | None = None
    for column in ["gc", *columns]:
        cell = f"{name}/{column}"
        most_s = min(run.most_seconds, cells.left_s() - START_S)
        if most_s < LEAST_SECONDS:
            return
        if cell not in cells:
            own = replace(run, limit_bytes=limit_bytes, most_seconds=most_s)
            limit_s = min(cells.left_s(), most_s + 3 * START_S)
            found = answer_of(measure, (name, column, own), limit_s, PRELOAD)
            if is_cut(found, cells):
                return
            if limit_bytes is not None:
                found["limit_gb"] = limit_bytes / 1e9
            cells.record(cell, found)
        if column == "gc":
            if "error" in cells[cell]:
                return
            limit_bytes = int(ROOM * cells[cell]["reserved_gb"] * 1e9)


def is_cut(found: dict[str, Any], cells: Cells) -> bool:
    """Whether the end of the whole run ended a process, and not its own limit: the next
    run measures it."""
    return found.get("error") == TOO_LONG and cells.left_s() <= 0


def main(
    bench: Bench,
    *,
    cases: tuple[str, ...] = tuple(CASES),
    columns: tuple[str, ...] = tuple(name for name in COLUMNS if name != "gc"),
    beside: int = 2,
    seconds: float = 6.0,
    most_seconds: float = 20.0,
    tiny: bool = False,
) -> int:
    """Run what is missing.

    Args:
        beside: cases at a time a GPU
        seconds: of its steps
        most_seconds: to a plan
        tiny: narrow, few tokens
    """
    for name in cases:
        try:
            case_of(name)
        except ValueError as error:
            raise UsageError(str(error)) from error
    settings = {"device": bench.device.type, "room": ROOM, "tiny": tiny}
    cells = bench.cells(settings)
    run = Run(
        device=bench.device.type,
        tiny=tiny,
        seconds=seconds,
        most_seconds=most_seconds,
        num_planned=MANY_PLANNED_STEPS,
    )

    def one(name: str, gpu: str) -> None:
        run_case(name, columns, replace(run, gpu=gpu), cells)

    on_gpus(cases, one, beside * gpus_of(run))
    print(summary(cells.data["cells"]))
    return 0


def gpus_of(run: Run) -> list[str]:
    """That share its cases."""
    return visible_gpus() if run.device == "cuda" else [""]


def is_good(cell: dict[str, Any]) -> bool:
    """Whether it trained, and under a plan at last."""
    return "error" not in cell and cell.get("num_planned", 0) >= LEAST_PLANNED_STEPS


def is_unfinished(cell: dict[str, Any]) -> bool:
    """Whether nothing went wrong, but its time was over: it shows nothing."""
    return not is_good(cell) and cell.get("error", TOO_LONG) == TOO_LONG


def is_emptied(cell: dict[str, Any]) -> bool:
    """Whether the allocator still had to empty its cache in one of the last steps."""
    least = cell.get("num_steps", 0) - NUM_LAST
    return is_good(cell) and any(step >= least for step in cell.get("emptied_in", ()))


def summary(cells: dict[str, Any]) -> str:
    """How many of a column trained in their limit, under a plan at last."""
    lines = []
    for column in COLUMNS:
        own = [cell for name, cell in cells.items() if name.endswith(f"/{column}")]
        if column == "gc":
            good = sum("error" not in cell for cell in own)
            lines.append(f"{column}: {good} of {len(own)}")
            continue
        unfinished = sum(is_unfinished(cell) for cell in own)
        good = sum(is_good(cell) for cell in own)
        lines.append(
            f"{column}: {good} of {len(own) - unfinished} under a plan, "
            f"{unfinished} unfinished, "
            f"{sum(is_emptied(cell) for cell in own)} whose cache was emptied at last"
        )
    return "\n".join(lines)
