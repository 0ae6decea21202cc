"""The README's figures are those of the recorded results."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_readme_is_up_to_date() -> None:
    command = [sys.executable, "-m", "recipes.bench.common.report", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
