"""Megatron-Core on two GPUs: the bitwise law, step time, activation peak.

    python recipes/bench/megatron_core.py --budget-s 200 --out results/megatron.json

Starts torchrun with two ranks and, should a rank die, starts it again: a cell that was
begun and has no result is then left out. Cells, in this order: the law (dropout on,
all layouts), tensor parallel 2 at the sizes of Figure 5.11 of the source, the bytes of
Table 5.4, pipeline parallel 2 with 8 micro-batches, Megatron's fine-grained offloading.
On a machine without GPUs the ranks run on gloo with tiny sizes (for trying it out).
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from harness import RESULTS

RANKS = Path(__file__).with_name("megatron_ranks.py")
ROOT = RANKS.parents[2]
MAX_STARTS = 3


def environment() -> dict[str, str]:
    """What the ranks run under."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        # One host: no name has to be looked up.
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "OMP_NUM_THREADS": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "PYTHONUNBUFFERED": "1",
        # megatron-core warns of Apex, Transformer Engine and one thing more: it wants
        # CUDA_DEVICE_MAX_CONNECTIONS=1, which would queue copies behind kernels.
        "PYTHONWARNINGS": "ignore",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
    }


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    """Start the ranks until they end well or the time is over."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--budget-s", type=float, default=200)
    parser.add_argument("--out", type=Path, default=RESULTS / "megatron.json")
    parser.add_argument("--only", nargs="*", default=[], help="cells that begin so")
    options = parser.parse_args()
    deadline = time.monotonic() + options.budget_s
    for _ in range(MAX_STARTS):
        left = deadline - time.monotonic()
        if left < 20:
            break
        words = ["--budget-s", f"{left:.0f}", "--out", str(options.out)]
        if options.only:
            words += ["--only", *options.only]
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2"]
        launcher += ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
        command = [sys.executable, *launcher, str(RANKS), *words]
        # A cell that has begun may end: a fifth more time than the ranks know of.
        try:
            code = subprocess.run(
                command, env=environment(), timeout=1.2 * left + 30
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
        print(f"ranks ended with {code}", flush=True)
        if code == 0:
            break
    if options.out.exists():
        cells = json.loads(options.out.read_text())["cells"]
        failed = [name for name, cell in cells.items() if "error" in cell]
        print(f"{len(cells)} cells, failed: {failed}")


if __name__ == "__main__":
    main()
