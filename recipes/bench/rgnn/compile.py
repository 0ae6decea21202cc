"""What a first training step compiles, and how long that takes, without a GPU.

    python -m recipes.bench rgnn.compile --budget-s 120

One layer of a width that no kernel was made for on a graph of AIFB's sizes, compiled
for an H100 or H200 in new processes, imports excluded: with empty caches, with what the
first left, and with empty caches and a bundle of its kernels. Seconds of CPU time,
which other work on the machine changes little, beside those of the clock. What a GPU
adds, loading a kernel and its launcher, is in `recipes.bench.rgnn.batches`.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from recipes.bench.harness.cli import Bench

ARCH, WIDTH = 90, 72
KINDS = ("rgcn", "rgat", "hgt")
STEP = """
import json, os, sys, time, torch
from hector.datasets.generate import TABLE_3_3, generate
from hector.runtime.ahead import compiling_for
from hector.runtime.launch import prepare_compiler
from hector.train import LayerKind, LayerSpec
from hector.train.model import compiled_layer
import hector.runtime.device, triton, triton.compiler
kind, arch, width = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
graph = generate(TABLE_3_3["aifb"], seed=0)
x = torch.randn(graph.num_nodes, width)
spec = LayerSpec(kind=LayerKind(kind), in_channels=width, out_channels=width, heads=1,
                 num_bases=None)
hits = []
triton.knobs.compilation.listener = lambda **found: hits.append(found["cache_hit"])
with compiling_for(arch):
    prepare_compiler().result()  # on a GPU: beside the graph's making
    clock, cpu = time.perf_counter(), os.times()
    compiled_layer(spec, graph)(x, graph).sum().backward()
    clock, end = time.perf_counter() - clock, os.times()
print(json.dumps({
    "cpu_s": round(sum(end[:4]) - sum(cpu[:4]), 2), "clock_s": round(clock, 2),
    "kernels": len(hits), "compiled": hits.count(False),
}))
"""


def caches(place: str) -> list[dict[str, str]]:
    """Environments of two processes, each with empty caches of its own."""
    return [
        {
            **os.environ,
            "HECTOR_CACHE": f"{place}/{name}/hector",
            "TRITON_CACHE_DIR": f"{place}/{name}/triton",
        }
        for name in ("here", "there")
    ]


def cell(kind: str) -> dict[str, Any]:
    """The three ways of one layer."""
    with tempfile.TemporaryDirectory() as place:
        here, there = caches(place)
        found = {"empty": _step(kind, here), "kept": _step(kind, here)}
        bundle = Path(place, "kernels.zip")
        command = [sys.executable, "-m", "hector", "kernels"]
        subprocess.run([*command, "pack", "--out", str(bundle)], env=here, check=True)
        subprocess.run([*command, "add", str(bundle)], env=there, check=True)
        return {**found, "shipped": _step(kind, there)}


def _step(kind: str, environment: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", "-c", STEP, kind, str(ARCH), str(WIDTH)]
    done = subprocess.run(command, env=environment, check=True, capture_output=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(bench: Bench) -> None:
    """Measure each layer once."""
    cells = bench.cells({"arch": ARCH, "width": WIDTH})
    for kind in KINDS:
        cells.run(kind, cell, kind)
