"""Races on a GPU: torch's stream sanitizer, NVIDIA's, random delays, poisoned blocks.

Every cell is a process of its own, beside the others; what it returned and said is
written down when it ends, or when the time is over:

- `law`: the law's CUDA cells under TORCH_CUDA_SANITIZER=1 (host target first).
- `sound`, `missing event`: a training step under the sanitizer, as it is and with the
  wait for a load planted out. The first must be clean and the second reported.
- `perturbed`, `perturbed missing event`: random sleeps before every copy and poisoned
  blocks; gradients against plain autograd. Equal, and different.
- `memcheck`, `initcheck`: compute-sanitizer over two steps with checksums, every tensor
  an allocation of its own so that its ends are known; or that the tool is missing.

    python recipes/bench/sanitize.py --budget-s 60
"""

import argparse
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

from harness import RESULTS, Cells

ROOT = Path(__file__).resolve().parents[2]
RACES = str(ROOT / "tests" / "ssdtrain" / "races")
LAW = "tests/ssdtrain/test_law.py"
LAW_PARTS = ("host and none", "verify", "tiered", "host")
CHECKS = ("memcheck", "initcheck")
TOOL_PLACES = (
    "usr/local/cuda*/bin/compute-sanitizer",
    "usr/local/cuda*/compute-sanitizer/compute-sanitizer",
    "opt/nvidia/**/compute-sanitizer/compute-sanitizer",
    "opt/nvidia/**/bin/compute-sanitizer",
)
CLEAN, A_REPORT, DIFFERENT = "code 0, no report", "a report", "code 3"
TAIL = 1500
CLOSE_S = 10


def child(kind: str) -> None:
    """Steps on the GPU with and without a session; exit 0 if equal, 3 if not."""
    sys.path.insert(0, RACES)
    import csan  # noqa: F401  (changes the sanitizer)
    import torch
    from perturb import missing_event, perturbed, poisoned
    from torch import nn

    import ssdtrain

    device = "cuda" if torch.cuda.is_available() else "cpu"
    checked = kind in CHECKS
    torch.manual_seed(0)
    width, rows = (1024, 2048) if device == "cuda" and not checked else (64, 32)
    layers = [(nn.Linear(width, width), nn.GELU()) for _ in range(8)]
    net = nn.Sequential(*[m for pair in layers for m in pair]).to(device)

    def step() -> list[torch.Tensor]:
        torch.manual_seed(1)
        x = torch.randn(rows, width, device=device, requires_grad=True)
        net.zero_grad()
        net(x).square().sum().backward()
        return [x.grad, *(p.grad.clone() for p in net.parameters())]

    expected, unequal = step(), 0
    with contextlib.ExitStack() as stack, tempfile.TemporaryDirectory() as directory:
        if "perturbed" in kind:
            stack.enter_context(perturbed(seed=0))
            stack.enter_context(poisoned())
        if "missing" in kind:
            stack.enter_context(missing_event())
        for target in ("host", "ssd"):
            settings: dict[str, Any] = {"target": target, "plan": "offload-all"}
            if target == "ssd":
                settings |= {"directory": directory, "gpu_direct": "off"}
            if checked:
                settings["verify"] = "checksum"
            settings |= {"min_bytes": 0, "window_bytes": 2 * rows * width * 4}
            with ssdtrain.offload(net, **settings) as session:
                for _ in range(2 if checked else 5):
                    found = step()
                    unequal += sum(
                        not torch.equal(a, b)
                        for a, b in zip(found, expected, strict=True)
                    )
                reloaded = sum(r.bytes_reloaded for r in session.steps)
            if not reloaded:
                sys.exit("nothing was reloaded: this proves nothing")
    print(f"{unequal} tensors differ")
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
    plain = {**os.environ, "PYTHONPATH": f"{ROOT}:{RACES}", "OMP_NUM_THREADS": "2"}
    plain.pop("TORCH_CUDA_SANITIZER", None)
    watched = {**plain, "TORCH_CUDA_SANITIZER": "1"}
    # Every tensor an allocation of its own: its ends are then known to memcheck.
    alone = {**plain, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    me = [sys.executable, str(Path(__file__).resolve()), "--child"]
    jobs = [
        ("sound", [*me, "sound"], CLEAN, watched),
        ("missing event", [*me, "missing"], A_REPORT, watched),
        ("perturbed", [*me, "perturbed"], CLEAN, plain),
        ("perturbed missing event", [*me, "perturbed missing"], DIFFERENT, plain),
    ]
    if tool is not None:
        for check in CHECKS:
            command = [tool, "--tool", check, "--error-exitcode", "9", *me, check]
            jobs.append((check, command, CLEAN, alone))
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "csan", "-m", "gpu", LAW]
    for part in LAW_PARTS:
        wanted = [*pytest, "-x", "-k", f"cuda and {part}"]
        jobs.append((f"law {part}", wanted, CLEAN, watched))
    return jobs


def main() -> None:
    """Start all cells that are missing; write each down when it ends."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--budget-s", type=float, default=60)
    parser.add_argument("--only", nargs="+", help="names of cells")
    parser.add_argument("--out", type=Path, default=RESULTS / "sanitize.json")
    options = parser.parse_args()
    if options.child:
        child(options.child)
        return
    deadline = time.monotonic() + options.budget_s
    # What is stopped at the deadline is written down behind it.
    cells = Cells(options.out, options.budget_s + CLOSE_S, {"law": LAW})
    tool = find_tool()
    if tool is None:
        places = ["PATH", *(f"/{pattern}" for pattern in TOOL_PLACES)]
        missing = {"verdict": "compute-sanitizer is not installed", "looked": places}
        for check in CHECKS:
            cells.run(check, lambda: dict(missing))
    running = [
        Job(*job)
        for job in jobs_of(tool)
        if job[0] not in cells and (not options.only or job[0] in options.only)
    ]
    while running:
        for job in list(running):
            if job.ended or time.monotonic() > deadline:
                running.remove(job)
                cells.run(job.name, job.result)
        time.sleep(0.1)


if __name__ == "__main__":
    main()
