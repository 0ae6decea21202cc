"""Ctrl-C at random moments: none lost in our frames, nothing left, the next step equal.

Each process trains a small model under drawn settings. A thread sends SIGINT to the
main thread somewhere in a step, twice in some; the program catches KeyboardInterrupt,
as a notebook does, restores weights and generators, and goes on. A signal is lost if
its handler raised and the program did not hear of it. After every one the next step's
gradients are compared byte for byte with those without ssdtrain, and nothing may be
held: no record, no pinned buffer, no slot. After the last: no thread and no file.

    OMP_NUM_THREADS=1 python -m recipes.bench safety.interrupts --signals 1000
"""

import gc
import json
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import ssdtrain
from recipes.bench.harness.cli import Bench
from recipes.bench.harness.processes import answer_of
from recipes.bench.safety.blocks import one_thread, run_campaign

BLOCK = 25
LIMIT_S = 1_500
"""A machine that others use may be ten times slower than a quiet one."""
WIDTH, ROWS = 48, 24
SETTLE_S = 20.0
"""Until what was under way has ended, and its buffers are free."""


class Net(nn.Module):
    """Norms, products, GELUs and dropout: recipes, a generator, and bytes to move."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH),
                nn.Linear(WIDTH, 2 * WIDTH),
                nn.GELU(),
                nn.Linear(2 * WIDTH, WIDTH),
                nn.Dropout(0.1),
            )
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[n, WIDTH] to a scalar."""
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


class Signals:
    """Sends SIGINT, and knows which of them the program heard of."""

    def __init__(self) -> None:
        self.num_raised = 0
        self.places: Counter[str] = Counter()
        self.lost: list[str] = []
        self.num_sent = 0
        self.requests: SimpleQueue[list[float] | None] = SimpleQueue()
        """Seconds before each signal; None: no more."""
        self._main = threading.main_thread().ident or 0
        self._sender = threading.Thread(target=self._send, name="signals", daemon=True)
        self._sender.start()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """With a handler that counts, and what Python ignores written down."""
        before = signal.signal(signal.SIGINT, self._handle)
        hook, sys.unraisablehook = sys.unraisablehook, self._ignored
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
            sys.unraisablehook = hook

    def _send(self) -> None:
        while (delays := self.requests.get()) is not None:
            for seconds in delays:
                time.sleep(seconds)
                signal.pthread_kill(self._main, signal.SIGINT)
                self.num_sent += 1

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if frame is not None and frame.f_code is interrupted.__code__:
            return  # between two of its steps: nothing to interrupt
        self.num_raised += 1
        inside = "elsewhere"
        while frame is not None:
            name = frame.f_globals.get("__name__", "")
            if name.startswith("ssdtrain."):
                inside = name
                break
            frame = frame.f_back
        self.places[inside] += 1
        raise KeyboardInterrupt

    def _ignored(self, unraisable: Any) -> None:
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            frames = traceback.extract_tb(unraisable.exc_traceback)
            own = [f for f in frames if "ssdtrain" in f.filename]
            where = f"{Path(own[-1].filename).name}:{own[-1].name}" if own else "?"
            name = getattr(unraisable.object, "__qualname__", "")
            self.lost.append(f"{where} {name}")


def settings_of(draw: random.Random, directory: str) -> dict[str, Any]:
    """One way to run the session."""
    target = draw.choice(["host", "ssd", "tiered"])
    settings: dict[str, Any] = {
        "target": target,
        "min_bytes": 0,
        "plan": draw.choice(["offload-all", "auto", "keep-all"]),
        "recompute": draw.choice(["auto", "off"]),
        "window_bytes": draw.choice([1, 1 << 16]),
        "host_bytes": 1 << 26,
        "verify": draw.choice(["off", "off", "checksum"]),
    }
    return settings if target == "host" else {**settings, "directory": directory}


def step(net: nn.Module) -> list[Tensor]:
    """Gradients of the one step that is run again and again."""
    torch.manual_seed(7)
    net.zero_grad(set_to_none=True)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    net(x).backward()
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


def held(session: ssdtrain.Session, settle_s: float = SETTLE_S) -> str:
    """What is not free although no graph is alive; empty: nothing."""
    offloader = session.cache.offloader
    deadline = time.monotonic() + settle_s
    while True:
        gc.collect()
        session.hints.wait_io()
        offloader.wait_io()
        storage = offloader.storage
        # Places wait for the next step, as they should.
        waiting_bytes = sum(session.cache.tables.place_sizes)
        found = {
            "pinned bytes": offloader.pool.used_bytes - waiting_bytes,
            "slot bytes": 0 if storage is None else storage.stats().used_bytes,
            "live bytes": session.live_bytes,
        }
        left = {name: value for name, value in found.items() if value}
        if not left or time.monotonic() > deadline:
            return json.dumps(left) if left else ""
        time.sleep(0.002)


def run_block(block: int) -> dict[str, Any]:
    """Signals of one process; what was wrong, with its settings."""
    one_thread()
    draw = random.Random(block)
    signals, bad = Signals(), []
    num_heard = 0
    with tempfile.TemporaryDirectory() as directory:
        settings = settings_of(draw, directory)
        torch.manual_seed(block)
        net = Net()
        expected = step(net)
        threads = {t.name for t in threading.enumerate()}
        weights = {k: v.clone() for k, v in net.state_dict().items()}
        with ssdtrain.offload(net, **settings) as session:
            for _ in range(4):
                begun = time.monotonic()
                step(net)
                long_s = time.monotonic() - begun
            for number in range(BLOCK):
                delays = [draw.uniform(0, 1.5 * long_s)]
                if draw.random() < 0.2:
                    delays.append(draw.uniform(0, long_s))
                with signals.installed():
                    num_heard += interrupted(signals, delays, net)
                net.load_state_dict(weights)
                what = held(session)
                if not what and not all(map(torch.equal, step(net), expected)):
                    what = "the next step's gradients differ"
                if what:
                    bad.append({"block": block, "signal": number, "what": what})
                    break
        signals.requests.put(None)
        left = {t.name for t in threading.enumerate()} - threads - {"signals"}
        files = [str(path) for path in Path(directory).rglob("*")]
        if left or files:
            bad.append({"block": block, "what": f"left behind: {left} {files}"})
    num_lost = signals.num_raised - num_heard
    if num_lost:
        bad.append({"block": block, "what": f"{num_lost} signals lost"})
    return {
        "signals": signals.num_raised,
        "lost": num_lost,
        "where_lost": dict(Counter(signals.lost)),
        "hit": dict(signals.places),
        "bad": [{**one, "settings": str(settings)} for one in bad],
    }


def interrupted(signals: Signals, delays: list[float], net: nn.Module) -> int:
    """Train until all signals are sent; how often KeyboardInterrupt came."""
    num_heard, last = 0, signals.num_sent + len(delays)
    asked = False
    while True:
        try:
            if not asked:
                asked = True
                signals.requests.put(delays)
            while signals.num_sent < last:
                step(net)
            for _ in range(1000):  # the last one may be on its way
                pass
            return num_heard
        except KeyboardInterrupt as error:
            # A second one in a `finally` of the first's way out has it as its context.
            heard: BaseException | None = error
            while heard is not None:
                num_heard += isinstance(heard, KeyboardInterrupt)
                heard = heard.__context__


def run_guarded(block: int) -> dict[str, Any]:
    """`run_block` in a process of its own, with a time limit."""
    found = answer_of(run_block, (block,), LIMIT_S)
    if "error" not in found:
        return found
    return {"signals": 0, "lost": 0, "bad": [{"block": block, "what": found["error"]}]}


def main(bench: Bench, *, signals: int = 1_000) -> None:
    """Blocks until the signals are sent or the time is over."""
    cells = bench.cells({"block": BLOCK})
    run_campaign(cells, run_guarded, signals, counted="signals", wrong="bad")
