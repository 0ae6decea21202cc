"""Every architecture there is, tiny: equal to plain training, or refused.

Every model type of transformers and the backbones of diffusers and timm, trained plain
and under imposed plans: everything to host memory; everything that has a recipe made
again and the rest on the SSD; what the search finds for a small budget; regions; random
plans. Ten steps under each. Compared are the bytes of every loss and gradient, of all
weights and buffers after every step, and what random generators draw next.

    python -m venv ENV
    echo PROJECT/lib/python3.11/site-packages > ENV/lib/python3.11/site-packages/a.pth
    ENV/bin/pip install --no-deps -r recipes/bench/safety/zoo.txt
    OMP_NUM_THREADS=1 ENV/bin/python -m recipes.bench.safety.zoo --workers 2

`PROJECT` is the project's own environment, which has transformers alone; there,
`--library transformers`. `--again "plain fails"` tries those again that a change of the
tiny models may have helped. Models run one after the other in a process that is started
anew when it ends or takes too long.
"""

import contextlib
import importlib
import json
import logging
import queue
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from typing import Any

import torch

from recipes.bench.common.cells import (
    Cells,
    arguments,
    child_environment,
    module_command,
)
from tests.ssdtrain.zoo.declared import declare

LIBRARIES = ("transformers", "diffusers", "timm")
LIMIT_S = 600
"""Of one model."""
MODELS_A_PROCESS = 60
"""Then another one starts: what models leave behind adds up."""


class Worker:
    """A process that judges one model after the other."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread()
        """Of its answers."""
        self._num_models = 0

    def judge(self, name: str) -> dict[str, Any]:
        if self.process is None or self._num_models == MODELS_A_PROCESS:
            self.stop()
            self._start()
        assert self.process is not None and self.process.stdin is not None
        self._num_models += 1
        try:
            self.process.stdin.write(name + "\n")
            self.process.stdin.flush()
            line = self._lines.get(timeout=LIMIT_S)
        except queue.Empty:
            self.stop()
            return {"verdict": "crash", "why": f"took more than {LIMIT_S} s"}
        except BrokenPipeError:
            line = ""
        if not line:
            code = self.process.wait()
            self.stop()
            return {"verdict": "crash", "why": f"the process ended with {code}"}
        found: dict[str, Any] = json.loads(line)
        return found

    def _start(self) -> None:
        command = module_command("recipes.bench.safety.zoo", "--worker")
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_environment(),
            text=True,
        )
        self._num_models = 0
        self._lines = queue.Queue()
        arguments = self.process.stdout, self._lines
        self._reader = threading.Thread(target=_read, args=arguments, daemon=True)
        self._reader.start()

    def stop(self) -> None:
        if self.process is None:
            return
        self.process.kill()
        self.process.wait()
        self._reader.join()
        with contextlib.suppress(BrokenPipeError):
            self.process.__exit__(None, None, None)  # its pipes
        self.process = None


def _read(stream: Any, lines: "queue.Queue[str]") -> None:
    for line in stream:
        if line.startswith("{"):
            lines.put(line)
    lines.put("")


def work() -> None:
    """Judge the models that are named on the standard input."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    declare()
    from tests.ssdtrain.zoo import judge

    out, sys.stdout = sys.stdout, sys.stderr  # what models print is no answer
    with tempfile.TemporaryDirectory() as directory:
        for line in sys.stdin:
            library, _, name = line.strip().partition("/")
            models = importlib.import_module(f"tests.ssdtrain.zoo.of_{library}")
            try:
                make, what = models.maker(name)
            except Exception as error:
                found = {"verdict": "plain fails", "why": judge.said(error)}
            else:
                found = {"class": what, **judge.verdict(make, directory)}
            print(json.dumps(found), file=out, flush=True)


def names_of(library: str) -> list[str]:
    """Names of the models of a library; none where it is not installed."""
    models = importlib.import_module(f"tests.ssdtrain.zoo.of_{library}")
    return [f"{library}/{name}" for name in models.names()]


def main() -> None:
    """The models that are missing, until the time is over."""
    parser = arguments(__doc__, 4 * 3600, "safety/zoo_cpu")
    parser.add_argument("--worker", action="store_true")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--library", action="append", choices=LIBRARIES)
    parser.add_argument("--only", action="append", help="LIBRARY/NAME")
    parser.add_argument("--again", action="append", help="verdicts to find again")
    options = parser.parse_args()
    if options.worker:
        work()
        return
    declare()
    cells = Cells(options.out, options.budget_s, {"device": "cpu"})
    names = options.only or [
        name for each in options.library or LIBRARIES for name in names_of(each)
    ]
    for name in names:
        if name in cells:
            verdict = cells[name].get("verdict")
            if options.only or verdict in (options.again or ()):
                cells.data["cells"].pop(name)
    left = iter([name for name in names if name not in cells])
    lock = threading.Lock()

    def judge_all() -> None:
        worker = Worker()
        try:
            while cells.left_s() > 0:
                with lock:
                    name = next(left, None)
                if name is None:
                    return
                start = time.monotonic()
                found = worker.judge(name)
                cells.record(
                    name, {**found, "cell_s": round(time.monotonic() - start, 1)}
                )
        finally:
            worker.stop()

    threads = [threading.Thread(target=judge_all) for _ in range(options.workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
