"""Compilation ahead of the first launch."""

import ast
import inspect
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from hector.runtime.bound import BoundPlan, TableLayout
from hector.runtime.launch import (
    Launch,
    Step,
    compile_together,
    parse_in_turn,
    prepare_compiler,
)
from hector.runtime.progress import telling


class Kernel:
    """Compiles in Triton's pool, or fails there."""

    def __init__(
        self, name: str, error: str = "", order: list[str] | None = None
    ) -> None:
        self.name, self.error, self.compiled = name, error, False
        self.__name__ = name
        self.order, self.loads = order, threading.Event()
        self.waits_for: Kernel | None = None

    @property
    def run(self) -> None:
        assert threading.current_thread() is not threading.main_thread()
        self.loads.set()

    def warmup(self, *args: object, grid: object) -> Any:
        from triton.runtime._async_compile import active_mode

        mode = active_mode.get()
        assert mode is not None
        if self.order is not None:
            self.order.append(self.name)
        steps: list[Callable[..., Any]] = [self._compile, self._finish]
        # Later versions also ask what to do after a failure.
        if "cleanup_fn" in inspect.signature(mode.submit).parameters:
            steps.append(lambda *_: None)
        return mode.submit(self.name, *steps)

    def _compile(self) -> "Kernel":
        if self.error:
            raise RuntimeError(self.error)
        if self.waits_for is not None:
            assert self.waits_for.loads.wait(60), "it is loaded when all are compiled"
        return self

    def _finish(self, kernel: object) -> None:
        self.compiled = True


def _launches(*kernels: Kernel) -> list[Launch]:
    return [Launch(k, (1, 1, 1), [], (), (), {}) for k in kernels]


def test_a_failed_compilation_does_not_stop_the_next_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton's mode stays active after a failure; every later plan then failed."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    bad = _launches(Kernel("good"), Kernel("bad", error="no such instruction"))
    with pytest.raises(RuntimeError, match="no such instruction"):
        compile_together([(launch, {}) for launch in bad])
    kernels = Kernel("one"), Kernel("other")
    compile_together([(launch, {}) for launch in _launches(*kernels)])
    assert all(k.compiled for k in kernels)


def test_products_are_compiled_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    order: list[str] = []
    names = ("hector_traversal_1", "hector_gemm_2", "hector_sums_3", "hector_outer_4")
    kernels = [Kernel(n, order=order) for n in names]
    compile_together([(launch, {}) for launch in _launches(*kernels)])
    assert order == [names[1], names[3], names[0], names[2]]
    assert prepare_compiler() is prepare_compiler() and prepare_compiler().done()
    # Launchers are made in the pool as well, not one by one as they are used.
    assert all(k.loads.is_set() for k in kernels)


def test_kernels_are_loaded_beside_compilations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    quick, slow = Kernel("quick"), Kernel("slow")
    slow.waits_for = quick
    compile_together([(launch, {}) for launch in _launches(quick, slow)])
    assert slow.compiled and slow.loads.is_set()


def test_who_waits_for_a_compilation_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    said: list[str] = []
    with telling(said.append):
        compile_together([(w, {}) for w in _launches(*map(Kernel, "abc"))])
    compile_together([(w, {}) for w in _launches(Kernel("d"), Kernel("e"))])
    whole = ["compiling 3 kernels", *(f"compiled {n} of 3 kernels" for n in (1, 2, 3))]
    assert sorted(said) == sorted(whole) and said[0] == whole[0]


def test_one_thread_at_a_time_parses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that do break each other's syntax trees under Python 3.11."""
    import triton.language as tl
    from triton.runtime import jit

    parse_in_turn()
    parse, parsing, arrived = ast.parse, threading.Lock(), threading.Semaphore(0)
    overlaps: list[bool] = []

    def slow_parse(source: str) -> ast.Module:
        overlaps.append(not parsing.acquire(blocking=False))
        try:
            arrived.acquire(timeout=0.2)  # the other one's, if it comes in as well
            return parse(source)
        finally:
            if not overlaps[-1]:
                parsing.release()

    def read() -> None:
        tl.sum.parse()
        arrived.release()

    threads = [threading.Thread(target=read) for _ in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(jit.ast, "parse", slow_parse)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert overlaps == [False, False]


def test_triton_is_hashed_beside_the_rest_of_its_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each waits for the other to have begun: one after the other, both give up."""
    from triton.runtime import cache

    hashing, adding = threading.Event(), threading.Event()
    met: list[bool] = []

    def key() -> str:
        hashing.set()
        met.append(adding.wait(20))
        return "key"

    def add() -> None:
        adding.set()
        met.append(hashing.wait(20))

    monkeypatch.setattr(cache, "triton_key", key)
    monkeypatch.setattr("hector.runtime.launch.add_shipped", add)
    prepare_compiler.__wrapped__().result(60)
    assert met == [True, True]


def test_launches_of_one_function_have_places_of_their_own() -> None:
    """Kernels of one text are one function, and read other values; so do graphs of one
    program, whose function is written once."""
    templates, layout, seen = ["a", "b"], TableLayout(), list[Any]()
    kernel = SimpleNamespace(
        run=lambda *args: seen.append(args), function="f", packed_metadata="m"
    )

    def call(*sizes: tuple[int, int]) -> None:
        launches = [
            Launch(kernel, (grid, 1, 1), [count], (), (), {}, t, kernel)
            for t, (grid, count) in zip(templates, sizes, strict=True)
        ]
        steps = [Step((), (launch,), ()) for launch in launches]
        args = (steps, torch.device("cpu"), lambda *_: torch.empty(0), {}, layout)
        BoundPlan(*args).call((), ())()

    call((1, 3), (1, 4))
    call((2, 5), (1, 6))
    assert [(args[0], args[-1]) for args in seen] == [(1, 3), (1, 4), (2, 5), (1, 6)]
    assert len(layout.written) == 1
