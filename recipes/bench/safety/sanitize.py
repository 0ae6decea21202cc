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
from pathlib import Path
from typing import Any

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
CHECKS = ("memcheck", "initcheck")
KERNELS = ("gather", "rebuild")
SMALL = (*CHECKS, "small")
TOOL_PLACES = (
    "usr/local/cuda*/bin/compute-sanitizer",
    "usr/local/cuda*/compute-sanitizer/compute-sanitizer",
    "opt/nvidia/**/compute-sanitizer/compute-sanitizer",
    "opt/nvidia/**/bin/compute-sanitizer",
)
CLEAN, A_REPORT, DIFFERENT = "code 0, no report", "a report", "code 3"
LATE_S = 0.02
TAIL = 1500
CLOSE_S = 10


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
    """The kernels of recipes on odd shapes; exit 0 if equal to torch's, 3 if not."""
    import torch
    from torch.nn import functional as F

    from ssdtrain.rebuild import kernels, triton_kernels
    from ssdtrain.rebuild.admission import same_bytes

    x = torch.randn(301, 1030, device="cuda", dtype=torch.bfloat16)
    weight, bias = (torch.randn_like(x[0]) for _ in range(2))
    width, normalize = x.shape[-1:], triton_kernels.normalize_rows
    _, *moments = torch.native_layer_norm(x, width, weight, bias, 1e-5)
    _, deviation = torch._fused_rms_norm(x, width, weight, 1e-5)
    norm = triton_kernels.Statistics(*moments)
    rms = triton_kernels.Statistics(None, deviation)
    table = kernels.tabulate(F.gelu, x.dtype, x.device)
    even = x[:, :1024].contiguous()  # torch draws in vectors of 8 where 8 divides it
    torch.cuda.manual_seed(1)  # small, as models use: it fits into 32 bits
    state = torch.cuda.get_rng_state(x.device)
    drop = triton_kernels.DropoutDraw(0.1, 8)
    pairs = {
        "norm": (
            F.layer_norm(x, width, weight, bias, 1e-5),
            normalize(x, norm, weight, bias, fused=True),
        ),
        "rms norm": (
            F.rms_norm(x, width, weight, 1e-5),
            normalize(x, rms, weight, None, fused=False),
        ),
        "gelu": (F.gelu(x), triton_kernels.look_up(x, table)),
        "widen": (x.float(), triton_kernels.widen_halves(x)),
        "mask": (
            torch.native_dropout(even, drop.rate, True)[1],
            triton_kernels.draw_dropped(tuple(even.shape), state, drop, x.device),
        ),
    }
    unequal = [name for name, pair in pairs.items() if not same_bytes(*pair)]
    print(f"{len(unequal)} of {len(pairs)} kernels differ: {unequal}")
    sys.exit(3 if unequal else 0)


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
    if kind in CHECKS and device == "cpu":
        sys.exit("torch sees no GPU under compute-sanitizer: this proves nothing")
    if idle:
        sys.exit(f"nothing was reloaded from {idle}: this proves nothing")
    sys.exit(3 if unequal else 0)


class Job:
    """A process beside the others; what it says goes into a file.

    Args:
        expects: in words; `verdict` says whether it came so.
        environment: on top of this process's own.
    """

    def __init__(
        self, name: str, command: list[str], expects: str, environment: dict[str, str]
    ) -> None:
        self.name, self.expects = name, expects
        self._start = time.monotonic()
        self._log = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def ended(self) -> bool:
        """Whether its process has."""
        return self._process.poll() is not None

    def result(self) -> dict[str, Any]:
        """Its code (None: stopped here), time, reports, verdict, and last words."""
        code = self._process.poll()
        if code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._log.seek(0)
        said = self._log.read().decode(errors="replace")
        self._log.close()
        reports = said.count("CSAN detected a possible data race")
        return {
            "expects": self.expects,
            "verdict": verdict(self.expects, code, said, reports),
            "code": code,
            "seconds": round(time.monotonic() - self._start, 1),
            "races_reported": reports,
            "tail": said[-TAIL:],
        }


def verdict(expects: str, code: int | None, said: str, reports: int) -> str:
    """`as expected`, or what else it was."""
    if "Device not supported" in said:
        return "compute-sanitizer does not support this device"
    if expects == A_REPORT:
        # The process may have ended on its own error or be cut off: it was caught.
        found = reports > 0
    elif code is None:
        return "not finished in the time given"
    elif expects == DIFFERENT:
        found = code == 3
    else:
        found = code == 0 and reports == 0
    return "as expected" if found else "NOT as expected"


def find_tool() -> str | None:
    """compute-sanitizer, wherever a CUDA toolkit or Nsight put it."""
    found = shutil.which("compute-sanitizer")
    if found is not None:
        return found
    for pattern in TOOL_PLACES:
        for path in sorted(Path("/").glob(pattern), reverse=True):
            if os.access(path, os.X_OK):
                return str(path)
    return None


def jobs_of(tool: str | None) -> list[tuple[str, list[str], str, dict[str, str]]]:
    """Name, command, expectation and environment of all processes."""
    plain = {**child_environment(), "OMP_NUM_THREADS": "2"}
    plain.pop("TORCH_CUDA_SANITIZER", None)
    watched = {**plain, "TORCH_CUDA_SANITIZER": "1"}
    # Every tensor an allocation of its own: its ends are then known to memcheck.
    alone = {**plain, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    me = command_of("safety.sanitize")
    jobs = [
        ("small", [*me, "small"], CLEAN, plain),
        ("small alone", [*me, "small"], CLEAN, alone),
        ("sound", [*me, "sound"], CLEAN, watched),
        ("missing event", [*me, "missing"], A_REPORT, watched),
        ("perturbed", [*me, "perturbed"], CLEAN, plain),
        ("perturbed missing event", [*me, "perturbed missing"], DIFFERENT, plain),
    ]
    if tool is not None:
        for check in CHECKS:
            command = [tool, "--tool", check, "--error-exitcode", "9", *me, check]
            jobs.append((check, command, CLEAN, alone))
        for kernels in KERNELS:
            command = [tool, "--error-exitcode", "9", *me, kernels]
            jobs.append((f"{kernels} memcheck", command, CLEAN, alone))
    pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "gpu"]
    pytest += ["-p", "tests.ssdtrain.races.csan"]
    for part, cells in LAW_PARTS.items():
        tests = [f"{LAW}::test_bitwise_law{cell}" for cell in cells]
        jobs.append((f"law {part}", [*pytest, *tests], CLEAN, watched))
    return jobs


def main(bench: Bench, kind: str = "", /) -> None:
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
    # What is stopped at the deadline is written down behind it.
    bench.budget_s += CLOSE_S
    cells = bench.cells({"law": LAW, "parts": LAW_PARTS})
    tool = find_tool()
    if tool is None:
        places = ["PATH", *(f"/{pattern}" for pattern in TOOL_PLACES)]
        missing = {"verdict": "compute-sanitizer is not installed", "looked": places}
        for check in (*CHECKS, *(f"{kernels} memcheck" for kernels in KERNELS)):
            cells.run(check, lambda: dict(missing))
    running = [Job(*job) for job in jobs_of(tool) if cells.is_wanted(job[0])]
    while running:
        for job in list(running):
            if job.ended or time.monotonic() > deadline:
                running.remove(job)
                cells.run(job.name, job.result)
        time.sleep(0.1)
