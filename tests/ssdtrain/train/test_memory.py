"""The observer that stands in for the allocator on a CPU."""

import gc
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ssdtrain.train.memory import SampledWatch, SavedObserver

KIB = 1024


def test_bytes_are_the_sum_of_distinct_saved_storages() -> None:
    x = torch.randn(256, requires_grad=True)  # a leaf, saved by exp: 0 B (saves result)
    with SavedObserver() as observer:
        a = x.exp()  # saves its result: 1 KiB
        b = a * a  # saves a twice: nothing new
        c = b[:128].sin()  # saves a view of b: the storage of b, 1 KiB
        assert observer.live_bytes == 2 * KIB
        c.sum().backward()
    assert observer.live_bytes == 0
    peak, samples = observer.take()
    assert peak == 2 * KIB
    assert [s.num_bytes for s in samples] == [KIB, 2 * KIB, KIB, 0]
    assert observer.take() == (0, [])


def test_parameters_are_not_counted() -> None:
    linear = nn.Linear(64, 64)
    x = torch.randn(4, 64)  # saved for the gradient of the weight: 1 KiB
    with SavedObserver() as observer:
        y = linear(x).sum()
        assert observer.live_bytes == KIB
        y.backward()


def test_gradients_are_untouched_and_a_dropped_graph_is_let_go() -> None:
    def gradient(observed: bool) -> torch.Tensor:
        torch.manual_seed(0)
        x = torch.randn(8, 8, requires_grad=True)
        run = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.GELU())
        with SavedObserver() if observed else torch.enable_grad():
            checkpoint(run, x, use_reentrant=False).sum().backward()
        return x.grad

    assert torch.equal(gradient(True), gradient(False))
    with SavedObserver() as observer:
        y = torch.randn(64, requires_grad=True).exp()
        assert observer.live_bytes > 0
        del y
        gc.collect()
        assert observer.live_bytes == 0


def test_sampled_watch_sees_a_level() -> None:
    level, looks, seen = [5], [0], threading.Event()

    def read() -> int:
        looks[0] += 1
        if looks[0] > 3:
            seen.set()
        return level[0]

    watch = SampledWatch(read, interval_s=0.001)
    for expected in (5, 9):
        level[0], looks[0] = expected, 0
        seen.clear()
        with watch:
            assert seen.wait(60)
        peak, samples = watch.take()
        assert peak == expected
        assert len(samples) > 1
        assert samples == sorted(samples)


def test_a_watch_that_nobody_leaves_ends_with_the_main_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A daemon would be killed inside a C++ call, and the process abort."""
    ended = threading.Thread(target=int)
    ended.start()
    ended.join()
    before = set(threading.enumerate())
    SampledWatch(lambda: 0, interval_s=0.001).__enter__()
    [sampler] = set(threading.enumerate()) - before
    assert not sampler.daemon
    monkeypatch.setattr(threading, "main_thread", lambda: ended)
    sampler.join(60)
    assert not sampler.is_alive()
