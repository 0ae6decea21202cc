"""Launches of generated kernels, and their compilation ahead of the first one."""

import contextlib
import functools
import importlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextvars import copy_context
from dataclasses import dataclass
from threading import Lock, Thread
from typing import Any, NamedTuple

import torch

from hector.ir.node import Node
from hector.runtime.ahead import target
from hector.runtime.bundle import add_shipped
from hector.runtime.progress import Listener, listener

logger = logging.getLogger(__name__)

ALIGNMENT_BYTES = 16
"""Triton compiles a kernel for pointers aligned so; PyTorch's own memory always is."""


@dataclass
class Launch:
    """One kernel launch; slots are filled in at each call.

    This is the way of the first call, of the interpreter and of inputs at odd
    addresses; see [Note: bound plans] for the others.
    """

    function: Any
    grid: tuple[int, ...]
    args: list[Any]
    slots: tuple[tuple[int, Node], ...]
    """(position, value) of each argument that holds a value."""
    partials: tuple[tuple[int, Node], ...]
    """(position, value) of each argument that holds a value's partial sums."""
    options: dict[str, int]
    template: Any = None
    """What it was made of: one object for all graphs. Launches of one program may share
    a function, if their kernels have one text."""
    compiled: Any = None
    """The kernel that Triton made for aligned values, once it ran."""

    def __call__(self, aligned: bool) -> None:
        if target() is not None:
            return
        made = self.function[self.grid](*self.args, **self.options)
        if made is not None and aligned and hasattr(made, "packed_metadata"):
            self.compiled = made

    def release(self) -> None:
        """Forget the tensors of this call: values must not outlive it."""
        for position, _ in self.slots:
            self.args[position] = None
        for position, _ in self.partials:
            self.args[position] = None

    def compile(self, dtypes: Mapping[Node, torch.dtype]) -> Any:
        """Compile for values of these dtypes; nothing is launched."""
        args = list(self.args)
        for position, node in self.slots:
            args[position] = dtypes[node]
        for position, _ in self.partials:
            args[position] = torch.float32
        return self.function.warmup(*args, grid=self.grid, **self.options)


class Partial(NamedTuple):
    """The partial sums of a value, which are memory like a value's."""

    node: Node


Key = Node | Partial
"""What has memory in a plan."""


@dataclass(frozen=True)
class TorchOp:
    """An operation on parameters run by PyTorch."""

    node: Node
    reads: tuple[Node, ...]
    """Whose memory it reads: views are taken as it runs."""


@dataclass(frozen=True)
class Step:
    """One kernel of the plan, and whose memory begins and ends with it; see
    [Note: lifetimes]."""

    makes: tuple[tuple[Key, tuple[int, ...], torch.dtype], ...]
    work: tuple[Launch | TorchOp, ...]
    dead: tuple[Key, ...]


@functools.cache
def prepare_compiler() -> "Future[None]":
    """Import Triton, hash its own files, add bundles of kernels to its cache and load
    its driver next to the caller's work.

    Every look-up in Triton's cache begins with that hash: with the driver it is more
    than the rest of a start with kept kernels, so each has a thread. Called for the
    first graph on a GPU.
    """
    found: Future[None] = Future()

    def prepare() -> None:
        with _told("Triton is not ready"):
            from triton.compiler import compiler
            from triton.runtime import cache, driver

            # What is imported below needs nothing that this thread would import.
            hashing = Thread(target=_hash_triton, args=((cache, compiler),))
            hashing.start()
            try:
                # The first argument of a kernel that is looked at imports it.
                with contextlib.suppress(ImportError):
                    importlib.import_module("triton.experimental.gluon")
                add_shipped()
                driver.active.get_current_device()
            finally:
                hashing.join()
        found.set_result(None)

    Thread(target=prepare, name="hector-compiler", daemon=True).start()
    return found


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Go on after an error: whoever compiles meets the same one, where it belongs."""
    try:
        yield
    except Exception:
        logger.debug(what, exc_info=True)


def _hash_triton(modules: Sequence[Any]) -> None:
    """Python's lock is free while the libraries are read, hundreds of megabytes."""
    with _told("Triton's files have no hash"):
        for module in modules:
            if hasattr(module, "triton_key"):
                module.triton_key()


def _load(device: int | None, kernel: Any) -> None:
    """Make a compiled kernel ready to launch, in whichever thread."""
    if device is not None:
        torch.cuda.set_device(device)
        # A new thread has no context before it asks for something.
        torch.cuda.mem_get_info(device)
    if kernel is not None:
        _ = kernel.run


def _is_product(launch: Launch) -> bool:
    name = launch.function.__name__
    return "gemm" in name or "outer" in name


class _Counted:
    """Tells how many of the kernels are compiled, from whichever thread."""

    def __init__(self, num_kernels: int, tell: Listener) -> None:
        self._num_kernels, self._tell, self._num_done = num_kernels, tell, 0
        self._lock = Lock()
        tell(f"compiling {num_kernels} kernels")

    def one_more(self, _: Any) -> None:
        """A kernel is compiled, or could not be."""
        with self._lock:
            self._num_done += 1
            done = self._num_done
        self._tell(f"compiled {done} of {self._num_kernels} kernels")


class _Compilers(ThreadPoolExecutor):
    """Threads that compile, and load what is compiled; each compilation is counted."""

    def __init__(self, num_threads: int, count: _Counted) -> None:
        super().__init__(num_threads)
        self._count = count

    def submit(self, *call: Any, **named: Any) -> "Future[Any]":
        """As the executor's own."""
        future = super().submit(*call, **named)
        future.add_done_callback(self._count.one_more)
        return future

    def load(self, device: int | None, kernel: Any) -> "Future[Any]":
        """Make a compiled kernel ready to launch."""
        return super().submit(_load, device, kernel)


def _as_compiled(made: Sequence[Any]) -> Iterator[Any]:
    """Kernels as their compilations end; those that were there already come first."""
    waiting = {}
    for kernel in made:
        future = getattr(kernel, "future", None) if _in_pool(kernel) else None
        if future is None:
            yield kernel
        else:
            waiting[future] = kernel
    for future in as_completed(waiting):
        # Triton enters it in its own cache, in the thread that asked for it.
        yield waiting[future].result()


def _in_pool(kernel: Any) -> bool:
    from triton.runtime._async_compile import FutureKernel

    return isinstance(kernel, FutureKernel)


@functools.cache
def parse_in_turn() -> None:
    """Let one thread at a time parse the source of a Triton function, from now on.

    CPython 3.11 counts the depth of a syntax tree for all threads together: where it
    switches to another one that parses, both end in a SystemError ("AST constructor
    recursion depth mismatch").
    """
    from triton.runtime.jit import JITFunction

    parse, lock = JITFunction.parse, Lock()

    @functools.wraps(parse)
    def in_turn(function: Any) -> Any:
        with lock:
            return parse(function)

    JITFunction.parse = in_turn


def compile_together(
    wanted: Sequence[tuple[Launch, Mapping[Node, torch.dtype]]],
) -> None:
    """Compile the kernels of plans at once, on all cores, each for values of the dtypes
    next to it.

    Half of a compilation is the assembler's process and most of the rest runs without
    Python's lock, so threads do. Some versions of Triton then run a C compiler for the
    launcher of each signature, when the kernel is first launched: that is done here,
    next to the compilations that still run.
    """
    from triton import AsyncCompileMode

    workers = min(len(wanted), len(os.sched_getaffinity(0)))
    ahead = target()
    if workers < (2 if ahead is None else 1):
        return
    prepare_compiler().result()
    parse_in_turn()
    count = _Counted(len(wanted), listener())
    # Products take several times as long as traversals: they are not to be last.
    wanted = sorted(wanted, key=lambda w: not _is_product(w[0]))

    def compile_all() -> None:
        loads = []
        with _Compilers(workers, count) as pool:
            with AsyncCompileMode(pool):
                made = [launch.compile(dtypes) for launch, dtypes in wanted]
                for kernel in _as_compiled(made):
                    if ahead is not None:
                        ahead.made(kernel)
                    else:
                        loads.append(pool.load(device, kernel))
        for load in loads:
            load.result()

    known = ahead is None and torch.cuda.is_initialized()
    device = torch.cuda.current_device() if known else None
    # Triton leaves the mode active when a compilation fails; it ends with this copy of
    # the context, and the next plan compiles.
    copy_context().run(compile_all)
