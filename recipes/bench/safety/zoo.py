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
the tiny models may have helped. Models run one after the other in a process that is
started anew when it ends or takes too long.
"""

import importlib
import logging
import multiprocessing
import tempfile
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import torch

from recipes.bench.harness.cli import Bench
from tests.ssdtrain.zoo.declared import declare

LIBRARIES = ("transformers", "diffusers", "timm")
LIMIT_S = 600
"""Of one model."""
MODELS_A_PROCESS = 60
"""Then another one starts: what models leave behind adds up."""


class Worker:
    """A process that judges one model after the other."""

    def __init__(self) -> None:
        self.process: Any = None
        self._pipe: Any = None
        self._num_models = 0

    def judge(self, name: str) -> dict[str, Any]:
        if self.process is None or self._num_models == MODELS_A_PROCESS:
            self.stop()
            self._start()
        self._num_models += 1
        try:
            self._pipe.send(name)
            if self._pipe.poll(LIMIT_S):
                return dict(self._pipe.recv())
            why = f"took more than {LIMIT_S} s"
        except (EOFError, ConnectionError):
            self.process.join()
            why = f"the process ended with {self.process.exitcode}"
        self.stop()
        return {"verdict": "crash", "why": why}

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self._num_models = 0

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self._pipe.close()
        self.process = None


def work(pipe: Connection) -> None:
    """Judge the models that are named."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    declare()
    from tests.ssdtrain.zoo import judge

    with tempfile.TemporaryDirectory() as directory:
        while True:
            library, _, name = pipe.recv().partition("/")
            models = importlib.import_module(f"tests.ssdtrain.zoo.of_{library}")
            try:
                make, what = models.maker(name)
            except Exception as error:
                found = {"verdict": "plain fails", "why": judge.said(error)}
            else:
                found = {"class": what, **judge.verdict(make, directory)}
            pipe.send(found)


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
    left = iter([name for name in names if name not in cells])
    lock = threading.Lock()

    def judge_all(_: int) -> None:
        worker = Worker()
        try:
            while cells.left_s() > 0:
                with lock:
                    name = next(left, None)
                if name is None:
                    return
                start = time.monotonic()
                found = worker.judge(name)
                took = round(time.monotonic() - start, 1)
                cells.record(name, {**found, "cell_s": took})
        finally:
            worker.stop()

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(judge_all, range(workers)))
