"""Races on a GPU: torch's stream sanitizer, NVIDIA's, random delays, poisoned blocks.

Every cell is a process of its own, and writes down what it returned and said:

- `law`: the law's CUDA cells under TORCH_CUDA_SANITIZER=1 (host target first).
- `sound`, `missing event`: a training step under the sanitizer, as it is and with the
  wait for a load planted out. The first must be clean and the second reported.
- `perturbed`, `perturbed missing event`: random sleeps before every copy and poisoned
  blocks; gradients against plain autograd. Equal, and different.
- `memcheck`, `initcheck`: compute-sanitizer over one step, if it is installed.

    python recipes/bench/sanitize.py --budget-s 90
"""

import argparse
import contextlib
import os
import shutil
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
TAIL = 1500


def child(kind: str) -> None:
    """Steps on the GPU with and without a session; exit 0 if equal, 3 if not."""
    sys.path.insert(0, RACES)
    import csan  # noqa: F401  (changes the sanitizer)
    import torch
    from perturb import missing_event, perturbed, poisoned
    from torch import nn

    import ssdtrain

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    width, rows = (1024, 2048) if device == "cuda" else (64, 32)
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
            settings |= {"min_bytes": 0, "window_bytes": 2 * rows * width * 4}
            with ssdtrain.offload(net, **settings) as session:
                for _ in range(2 if "check" in kind else 5):
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


def run(command: list[str], timeout_s: float, sanitizer: bool) -> dict[str, Any]:
    """One process: its code, its time and the end of what it said."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{RACES}",
        "OMP_NUM_THREADS": "4",
    }
    environment.pop("TORCH_CUDA_SANITIZER", None)
    if sanitizer:
        environment["TORCH_CUDA_SANITIZER"] = "1"
    start = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            timeout=timeout_s,
            capture_output=True,
            text=True,
            check=False,
        )
        code, said = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as late:
        code, said = -1, f"no end after {timeout_s:.0f} s\n" + str(late.stdout or "")
    reports = said.count("CSAN detected a possible data race")
    return {
        "code": code,
        "seconds": round(time.monotonic() - start, 1),
        "races_reported": reports,
        "tail": said[-TAIL:],
    }


def main() -> None:
    """Run the cells that are missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--budget-s", type=float, default=90)
    parser.add_argument("--out", type=Path, default=RESULTS / "sanitize.json")
    options = parser.parse_args()
    if options.child:
        child(options.child)
        return
    cells = Cells(options.out, options.budget_s, {"law": LAW})
    deadline = time.monotonic() + options.budget_s

    def cell(name: str, command: list[str], expects: str, sanitizer: bool) -> None:
        def measured() -> dict[str, Any]:
            left_s = max(deadline - time.monotonic(), 20)
            return {"expects": expects, **run(command, left_s, sanitizer)}

        cells.run(name, measured)

    me = [sys.executable, str(Path(__file__).resolve()), "--child"]
    cell("sound", [*me, "sound"], "code 0, no report", True)
    cell("missing event", [*me, "missing"], "a report", True)
    cell("perturbed", [*me, "perturbed"], "code 0", False)
    cell("perturbed missing event", [*me, "perturbed missing"], "code 3", False)
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if Path(tool).exists():
        for check in ("memcheck", "initcheck"):
            command = [tool, "--tool", check, "--error-exitcode", "9", *me, check]
            cell(check, command, "code 0", False)
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "csan", "-m", "gpu", LAW]
    for part in ("host and none", "verify", "tiered", "host"):
        wanted = [*pytest, "-x", "-k", f"cuda and {part}"]
        cell(f"law {part}", wanted, "code 0, no report", True)


if __name__ == "__main__":
    main()
