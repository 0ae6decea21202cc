"""Benchmarks are scripts that find one another by their folder."""

import sys
from pathlib import Path

# Behind everything else: recipes/bench/io.py must not stand before Python's own.
sys.path.append(str(Path(__file__).resolve().parents[2] / "recipes" / "bench"))
