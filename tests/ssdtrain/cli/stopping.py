"""Runs that are stopped by a signal, as from a shell."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.ranks import LONGEST_S, ROOT, reaped

LONG = ("train.steps=100000", "train.compare=false", "train.checkpoint_every=50000")


def metrics(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def losses(run: Path) -> dict[int, float]:
    with_ = [v for v in metrics(run) if v["leg"] == "with ssdtrain"]
    return {v["step"]: v["loss"] for v in with_}


def stopped(
    directory: Path, signum: int, *words: str, run: str = "latest"
) -> tuple[int, str, Path]:
    """Start a long run, and signal it once a step of the run with ssdtrain is over.

    run: a pattern of its directory below `runs`.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "ssdtrain", "train", *words],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        text=True,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    deadline = time.monotonic() + LONGEST_S
    path = directory / "runs" / run
    with reaped(process):
        while time.monotonic() < deadline and process.poll() is None:
            path = next((directory / "runs").glob(run), path)
            if (path / "metrics.jsonl").exists() and len(losses(path)) > 1:
                break
            time.sleep(0.1)
        process.send_signal(signum)
        _, error = process.communicate(timeout=LONGEST_S)
    return process.returncode, error, path
