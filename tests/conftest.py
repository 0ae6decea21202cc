"""Shared by all tests: nothing of the user's is read or written, and processes that
tests start say where they crash."""

import gc
import importlib
import os
import signal
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.interpreter import interpret_fast

INTERPRET = "TRITON_INTERPRET"


def pytest_configure() -> None:
    """Take interrupts: a shell starts what runs in the background without them, and
    tests interrupt processes, this one too. How busy the machine is fails no test, nor
    which modules other tests have imported."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Before Python's own distutils, or it refuses to come at all.
    importlib.import_module("setuptools")
    gc.disable()  # what is imported is not garbage
    slow = [HealthCheck.too_slow]
    settings.register_profile("any", deadline=None, suppress_health_check=slow)
    settings.load_profile("any")
    if os.environ.get(INTERPRET) == "1":
        interpret_fast()


def pytest_collection_finish() -> None:
    gc.enable()


def pytest_unconfigure() -> None:
    """Let the interpreter's end collect what `small_heap` has hidden."""
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Caches of this run alone: the wear log, compiled hooks, kernels. Processes that
    tests start inherit it.

    Where Python may not keep bytecode beside its sources, it is kept here: a process
    that compiles torch's and DeepSpeed's sources takes three seconds more to start.
    """
    with pytest.MonkeyPatch.context() as patch:
        place = tmp_path_factory.mktemp("cache")
        place.chmod(0o700)
        patch.setitem(os.environ, "XDG_CACHE_HOME", str(place))
        patch.setitem(os.environ, "PYTHONFAULTHANDLER", "1")
        if sys.dont_write_bytecode:
            patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
            patch.setenv("PYTHONPYCACHEPREFIX", str(place / "bytecode"))
        yield


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> None:
    """Hide from the collector what is alive before a module's tests.

    Half a million objects of imported libraries make `gc.collect()` take 0.3 s, and
    hundreds of tests call it. What a test makes is collected as ever.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """As many threads for an operator of torch as before: benchmarks set their own, and
    small operators take ten times as long with two as with one where cores are busy."""
    torch = sys.modules.get("torch")
    before = None if torch is None else torch.get_num_threads()
    yield
    if torch is not None and torch.get_num_threads() != before:
        torch.set_num_threads(before)
