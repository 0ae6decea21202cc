"""Every architecture there is, tiny: equal to plain training, or refused.

Every model type of transformers and the backbones of diffusers and timm, trained plain
and under imposed plans: everything to host memory; everything that has a recipe made
again and the rest on the SSD; what the search finds for a small budget; regions; random
plans. Ten steps under each. Compared are the bytes of every loss and gradient, of all
weights and buffers after every step, and what random generators draw next.

    python -m venv ENV
    echo PROJECT/lib/python3.11/site-packages > ENV/lib/python3.11/site-packages/a.pth
    ENV/bin/pip install --no-deps -r recipes/bench/safety/zoo.txt
    OMP_NUM_THREADS=1 ENV/bin/python -m recipes.bench safety.zoo --workers 2

`PROJECT` is the project's own environment, which has transformers alone; there,
`--library transformers`. `--verdicts "plain fails"` tries those again that a change of
the tiny models may have helped. Each model has a process of its own, forked from one
that has all imports done.
"""

import importlib
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from recipes.bench.harness.cli import Bench
from recipes.bench.harness.processes import answer_of
from recipes.bench.safety.blocks import one_thread
from tests.ssdtrain.zoo.declared import declare

LIBRARIES = ("transformers", "diffusers", "timm")
LIMIT_S = 600.0
"""Of one model."""


def judge(name: str) -> dict[str, Any]:
    """How a model fares, in a process of its own."""
    found = answer_of(judged, (name,), LIMIT_S, ["tests.ssdtrain.zoo.judge"])
    return found if "verdict" in found else {"verdict": "crash", "why": found["error"]}


def judged(named: str) -> dict[str, Any]:
    """How a model fares, here."""
    one_thread()
    warnings.simplefilter("ignore")
    declare()
    from tests.ssdtrain.zoo import judge

    library, _, name = named.partition("/")
    models = importlib.import_module(f"tests.ssdtrain.zoo.of_{library}")
    try:
        make, what = models.maker(name)
    except Exception as error:
        return {"verdict": "plain fails", "why": judge.said(error)}
    with tempfile.TemporaryDirectory() as directory:
        return {"class": what, **judge.verdict(make, directory)}


def names_of(library: str) -> list[str]:
    """Names of the models of a library; none where it is not installed."""
    models = importlib.import_module(f"tests.ssdtrain.zoo.of_{library}")
    return [f"{library}/{name}" for name in models.names()]


def main(
    bench: Bench,
    *,
    workers: int = 1,
    library: tuple[str, ...] = LIBRARIES,
    models: tuple[str, ...] = (),
    verdicts: tuple[str, ...] = (),
) -> None:
    """The models that are missing, until the time is over.

    Args:
        workers: processes
        models: LIBRARY/NAME: these, also if they are there
        verdicts: those that are found again
    """
    declare()
    cells = bench.cells({"device": "cpu"})
    names = models or [name for each in library for name in names_of(each)]
    for name in names:
        if name in cells and (models or cells[name].get("verdict") in verdicts):
            cells.data["cells"].pop(name)

    def one(name: str) -> None:
        if cells.is_wanted(name):
            start = time.monotonic()
            found = judge(name)
            cell_s = round(time.monotonic() - start, 1)
            cells.record(name, {**found, "cell_s": cell_s})

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(one, names))
