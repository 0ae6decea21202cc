"""Races on a GPU: torch's stream sanitizer, NVIDIA's, random delays, poisoned blocks.

Every cell is a process of its own, beside the others; what it returned and said is
written down when it ends, or when the time is over:

- `law ...`: cells of the law under TORCH_CUDA_SANITIZER=1, few of each kind.
- `sound`, `missing event`: a training step under the sanitizer, as it is and with the
  wait for a load planted out. The first must be clean and the second reported.
- `perturbed`, `perturbed missing event`: copies that begin 20 ms late and more, and
  poisoned blocks; gradients against plain autograd. Equal, and different.
- `memcheck`, `initcheck`: compute-sanitizer over two steps with checksums, every tensor
  an allocation of its own so that its ends are known; `small`, `small alone`: the same
  steps without it. `gather memcheck`, `rebuild memcheck`: the kernels of pydirect and
  of recipes. Or that the tool is missing.

    python -m recipes.bench safety.sanitize --budget-s 55
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from recipes.bench.harness.cli import Bench
from recipes.bench.harness.processes import child_environment, command_of
from recipes.bench.harness.records import ROOT

LAW = "tests/ssdtrain/test_law.py"
LAW_PARTS = {
    "host": ["[host-none-1-fp32-cuda]", "[host-none-4-bf16 autocast-cuda]"],
    "ssd": ["[ssd-none-1-fp32-cuda]", "[ssd-none-4-fp16 scaler-cuda]"],
    "tiered": ["[tiered-none-1-pure bf16-cuda]", "[tiered-none-4-fp32-cuda]"],
    "reentrant": ["[ssd-reentrant-1-fp32-cuda]", "[host-reentrant-1-pure bf16-cuda]"],
    "non-reentrant": ["[tiered-non-reentrant-1-bf16 autocast-cuda]"],
    "recipes, checksum": ["_under_verify[none-checksum-cuda]"],
    "recipes, shadow": ["_under_verify[none-shadow-cuda]"],
    "recipes, checkpoint": ["_under_verify[non-reentrant-checksum-cuda]"],
}
CHECKED = {
    **{"memcheck": "memcheck", "initcheck": "initcheck"},
    **{"gather": "memcheck", "rebuild": "memcheck"},
}
"""What runs under which of compute-sanitizer's tools."""
SMALL = ("memcheck", "initcheck", "small")
TOOL_PLACES = (
    "usr/local/cuda*/*/compute-sanitizer",
    "opt/nvidia/**/*/compute-sanitizer",
)
CLEAN, A_REPORT, DIFFERENT = "code 0, no report", "a report", "code 3"
LATE_S = 0.02
TAIL = 1500


def gather_child() -> None:
    """pydirect's kernels on a small table; exit 0 if equal to indexing, 3 if not."""
    import torch

    from pydirect import gather, memory

    unequal = 0
    for row_bytes in (4, 100, 1030, 4096):
        table = memory.empty_pinned((500, row_bytes), torch.uint8).random_(0, 255)
        for dtype in (torch.int32, torch.int64):
            index = torch.randint(0, 500, (3001,), dtype=dtype)
            for path in ("direct", "sorted"):
                out = gather.index_select(table, index.cuda(), path=path)
                gather.check()
                unequal += not torch.equal(out.cpu(), table[index.long()])
    print(f"{unequal} of 16 gathers differ")
    sys.exit(3 if unequal else 0)


def rebuild_child() -> None:
    """The kernel that draws a dropout's mask; exit 0 if equal to torch's, 3 if not."""
    import torch

    from ssdtrain.rebuild import triton_kernels
    from ssdtrain.rebuild.admission import same_bytes

    # Torch draws in vectors of 8 where 8 divides the elements.
    x = torch.randn(301, 1024, device="cuda", dtype=torch.bfloat16)
    torch.cuda.manual_seed(1)  # small, as models use: it fits into 32 bits
    state = torch.cuda.get_rng_state(x.device)
    drop = triton_kernels.DropoutDraw(0.1, 8)
    expected = torch.native_dropout(x, drop.rate, True)[1]
    drawn = triton_kernels.draw_dropped(tuple(x.shape), state, drop, x.device)
    differs = not same_bytes(expected, drawn)
    print(f"the mask differs: {differs}")
    sys.exit(3 if differs else 0)


def steps_child(kind: str) -> None:
    """Steps on the GPU with and without a session; exit 0 if equal, 3 if not."""
    import torch
    from torch import nn

    import ssdtrain
    import tests.ssdtrain.races.csan  # noqa: F401  (changes the sanitizer)
    from tests.ssdtrain.races.perturb import missing_event, perturbed, poisoned

    device = "cuda" if torch.cuda.is_available() else "cpu"
    small = kind in SMALL
    torch.manual_seed(0)
    width, rows = (1024, 2048) if device == "cuda" and not small else (64, 32)
    layers = [(nn.Linear(width, width), nn.GELU()) for _ in range(8)]
    net = nn.Sequential(*[m for pair in layers for m in pair]).to(device)

    def step() -> list[torch.Tensor]:
        torch.manual_seed(1)
        x = torch.randn(rows, width, device=device, requires_grad=True)
        net.zero_grad()
        net(x).square().sum().backward()
        return [x.grad, *(p.grad.clone() for p in net.parameters())]

    # On the host: a copy without its event may write over anything on the device.
    expected, unequal, idle = [t.cpu() for t in step()], 0, []
    with contextlib.ExitStack() as stack, tempfile.TemporaryDirectory() as directory:
        if "perturbed" in kind:
            stack.enter_context(perturbed(seed=0, always_on_gpu_s=LATE_S))
            stack.enter_context(poisoned())
        if "missing" in kind:
            stack.enter_context(missing_event())
        for target in ("host", "ssd"):
            settings: dict[str, Any] = {"target": target, "plan": "offload-all"}
            if target == "ssd":
                settings |= {"directory": directory, "gpu_direct": "off"}
            if small:
                settings["verify"] = "checksum"
            settings |= {"min_bytes": 0, "window_bytes": 2 * rows * width * 4}
            with ssdtrain.offload(net, **settings) as session:
                for _ in range(2 if small else 3):
                    found = [t.cpu() for t in step()]
                    unequal += sum(
                        not torch.equal(a, b)
                        for a, b in zip(found, expected, strict=True)
                    )
                # One whose tensors never die would give no report.
                session.hints.step_end()
                moved = sum(report.bytes_reloaded for report in session.steps)
            idle += [] if moved else [target]
            print(device, target, f"{moved} bytes reloaded", flush=True)
    print(f"{unequal} tensors differ")
    if kind in CHECKED and device == "cpu":
        sys.exit("torch sees no GPU under compute-sanitizer: this proves nothing")
    if idle:
        sys.exit(f"nothing was reloaded from {idle}: this proves nothing")
    sys.exit(3 if unequal else 0)


class Job(NamedTuple):
    """A process beside the others."""

    name: str
    command: list[str]
    expects: str
    """In words; `verdict` says whether it came so."""
    environment: dict[str, str]

    def result(self, deadline: float) -> dict[str, Any]:
        """Its code (None: stopped here), time, reports, verdict, and last words."""
        start = time.monotonic()
        process = subprocess.Popen(
            self.command,
            cwd=ROOT,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(timeout=max(deadline - start, 0))
            code = process.returncode
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            said, code = process.communicate()[0], None
        reports = said.count("CSAN detected a possible data race")
        return {
            "expects": self.expects,
            "verdict": verdict(self.expects, code, said, reports),
            "code": code,
            "seconds": round(time.monotonic() - start, 1),
            "races_reported": reports,
            "tail": said[-TAIL:],
        }


def verdict(expects: str, code: int | None, said: str, reports: int) -> str:
    """`as expected`, or what else it was."""
    if "Device not supported" in said:
        return "compute-sanitizer does not support this device"
    if expects != A_REPORT and code is None:
        return "not finished in the time given"
    found = {
        # The process may have ended on its own error or be cut off: it was caught.
        A_REPORT: reports > 0,
        DIFFERENT: code == 3,
        CLEAN: code == 0 and reports == 0,
    }
    return "as expected" if found[expects] else "NOT as expected"


def find_tool() -> str | None:
    """compute-sanitizer, wherever a CUDA toolkit or Nsight put it."""
    places = (each for pattern in TOOL_PLACES for each in Path("/").glob(pattern))
    found = sorted((p for p in places if os.access(p, os.X_OK)), reverse=True)
    return shutil.which("compute-sanitizer") or (str(found[0]) if found else None)


def jobs_of(tool: str | None) -> list[Job]:
    """All processes."""
    plain = {**child_environment(), "OMP_NUM_THREADS": "2"}
    plain.pop("TORCH_CUDA_SANITIZER", None)
    watched = {**plain, "TORCH_CUDA_SANITIZER": "1"}
    # Every tensor an allocation of its own: its ends are then known to memcheck.
    alone = {**plain, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    me = command_of("safety.sanitize", "--kind")
    jobs = [
        Job("small", [*me, "small"], CLEAN, plain),
        Job("small alone", [*me, "small"], CLEAN, alone),
        Job("sound", [*me, "sound"], CLEAN, watched),
        Job("missing event", [*me, "missing"], A_REPORT, watched),
        Job("perturbed", [*me, "perturbed"], CLEAN, plain),
        Job("perturbed missing event", [*me, "perturbed missing"], DIFFERENT, plain),
    ]
    for kind, check in CHECKED.items() if tool else ():
        name = kind if kind == check else f"{kind} {check}"
        command = [tool, "--tool", check, "--error-exitcode", "9", *me, kind]
        jobs.append(Job(name, command, CLEAN, alone))
    pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "gpu"]
    pytest += ["-p", "tests.ssdtrain.races.csan"]
    for part, cells in LAW_PARTS.items():
        tests = [f"{LAW}::test_bitwise_law{cell}" for cell in cells]
        jobs.append(Job(f"law {part}", [*pytest, *tests], CLEAN, watched))
    return jobs


def main(bench: Bench, *, kind: str = "") -> None:
    """Start all cells that are missing; write each down when it ends.

    Args:
        kind: of a cell, which runs in this process
    """
    if kind:
        {"gather": gather_child, "rebuild": rebuild_child}.get(
            kind, lambda: steps_child(kind)
        )()
        return
    deadline = time.monotonic() + bench.budget_s
    cells = bench.cells({"law": LAW, "parts": LAW_PARTS})
    tool = find_tool()
    if tool is None:
        missing = {"verdict": "compute-sanitizer is not installed"}
        cells.record("compute-sanitizer", {**missing, "looked": TOOL_PLACES})
    jobs = [job for job in jobs_of(tool) if cells.is_wanted(job.name)]
    with ThreadPoolExecutor(len(jobs) or 1) as pool:
        for job in jobs:
            pool.submit(lambda j=job: cells.record(j.name, j.result(deadline)))
