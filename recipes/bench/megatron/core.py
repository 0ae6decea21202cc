"""Megatron-Core on two or four GPUs: the bitwise law, step time, activation peak.

    python -m recipes.bench megatron.core --budget-s 300
    python -m recipes.bench megatron.core --ranks 4 --budget-s 80

Starts two ranks and, should one die or a cell hang, both again: a cell that was begun
and has no result is then left out, with what its rank said last. Cells, in this order:
the law (dropout on, all layouts), tensor parallel 2 at the sizes of Figure 5.11 of the
source, the bytes of Table 5.4, pipeline parallel 2 with 8 micro-batches, Megatron's
fine-grained offloading. Everything has ended when the budget has. Four ranks do the
law alone, in their own layouts.
On a machine without GPUs the ranks run on gloo with tiny sizes (for trying it out).
"""

import json
import os
import shlex
import signal
import subprocess
import time
from typing import Literal

from recipes.bench.harness.cli import Bench
from recipes.bench.harness.processes import child_environment, command_of
from ssdtrain.train.launch import free_port

MAX_STARTS = 5
LEAST_S = 25
"""Less time than this is not worth another start: imports alone take ten seconds."""
GRACE_S = 3
"""What the other rank may need to end by itself, and the first to write its file."""


def environment() -> dict[str, str]:
    """What the ranks run under."""
    return {
        # One host: no name has to be looked up.
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "OMP_NUM_THREADS": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        # A dead peer shows as a failed heartbeat at once, without a dump for minutes.
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "PYTHONUNBUFFERED": "1",
        # megatron-core warns of Apex, Transformer Engine and one thing more: it wants
        # CUDA_DEVICE_MAX_CONNECTIONS=1, which would queue copies behind kernels.
        "PYTHONWARNINGS": "ignore",
        **child_environment(),
    }


def start(words: list[str], num_ranks: int) -> list[subprocess.Popen[bytes]]:
    """All ranks, each in a session of its own."""
    shared = {
        **environment(),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    command = command_of("megatron.ranks", *words)
    return [
        subprocess.Popen(
            command,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            start_new_session=True,
        )
        for rank in range(num_ranks)
    ]


def wait(ranks: list[subprocess.Popen[bytes]], until: float) -> list[int | None]:
    """Wait until all ended, one failed, or the time is over; then none is left.

    until: seconds since the epoch. Returns: what each ended with; None: it was killed.
    """
    codes: list[int | None] = [None for _ in ranks]
    try:
        while None in codes and not any(codes) and time.time() < until:
            time.sleep(0.1)
            codes = [rank.poll() for rank in ranks]
        patience = time.time() + GRACE_S
        while None in codes and time.time() < min(patience, until + GRACE_S):
            time.sleep(0.1)
            codes = [rank.poll() for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, signal.SIGKILL)
                rank.wait()
    return codes


def main(bench: Bench, *, ranks: Literal[2, 4] = 2) -> None:
    """Start the ranks until they end well or the time is over."""
    if ranks == 4 and bench.out.name == "megatron.json":
        bench.out = bench.out.with_name("megatron_4.json")
    until = time.time() + bench.budget_s
    for _ in range(MAX_STARTS):
        if until - time.time() < LEAST_S:
            break
        words = ["--until", f"{until - GRACE_S:.1f}", "--out", str(bench.out)]
        told = "python -m recipes.bench megatron.core", shlex.join(bench.words)
        words += ["--command", " ".join(told)]
        if bench.only:
            words += ["--only", *bench.only]
        codes = wait(start(words, ranks), until - GRACE_S)
        print(f"ranks ended with {codes}", flush=True)
        if all(code == 0 for code in codes):
            break
    if bench.out.exists():
        cells = json.loads(bench.out.read_text())["cells"]
        failed = [name for name, cell in cells.items() if "error" in cell]
        print(f"{len(cells)} cells, failed: {failed}")
