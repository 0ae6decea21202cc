"""Runs the cases of generated kernels in one process of their own: see *_cases.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
DYNAMIC_LOOPS = (3, 7)
"""The first Triton whose interpreter has loop bounds from memory under numpy 2.4."""


CASES = ("kernel_cases.py", "sampled_cases.py", "message_cases.py")
DRAWING = ("drawing_cases.py",)
INTERPRETED_CASES = ("bound_cases.py",)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("files", [CASES, DRAWING], ids=["layers", "drawing"])
def test_generated_kernels(files: tuple[str, ...], tmp_path: Path) -> None:
    triton = pytest.importorskip("triton")
    env = {**os.environ, "HECTOR_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    if not torch.cuda.is_available():
        files += INTERPRETED_CASES if files is CASES else ()
        version = tuple(int(n) for n in triton.__version__.split(".")[:2])
        if version < DYNAMIC_LOOPS:
            pytest.skip(f"the interpreter of Triton {triton.__version__} has no loops")
        env["TRITON_INTERPRET"] = "1"
    paths = [str(Path(__file__).with_name(name)) for name in files]
    # numpy warns of what masked lanes hold.
    command = [sys.executable, "-W", "ignore", "-m", "pytest", "-q", *paths]
    command += ["-W", "ignore", "-p", "no:cacheprovider", "-o", "timeout=800"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
