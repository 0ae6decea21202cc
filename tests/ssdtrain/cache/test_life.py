"""Lifetimes: nothing is lost while a handle lives, nothing stays when it dies."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ssdtrain
from ssdtrain.cache import living
from ssdtrain.engines import hints
from ssdtrain.errors import SessionClosedError
from ssdtrain.plan.plan import PLAN_FILE
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.eventually import session_threads
from tests.ssdtrain.mlp import batch, mlp


def test_dropped_graph_frees_everything(everything: Any) -> None:
    model = mlp()
    with ssdtrain.offload(model, **everything) as session:
        loss = model(batch()).sum()
        assert not session.cache.is_idle
        del loss
        assert session.cache.is_idle
        assert session.cache.ledger.live_bytes == 0
        # A tensor on its way out stays in the window until compute has passed it.
        model(batch()).sum().backward()
    assert session.cache.offloader.pool.used_bytes == 0


def test_evaluation_leaves_no_trace(everything: Any) -> None:
    model = mlp()
    with ssdtrain.offload(model, **everything) as session:
        with torch.no_grad():
            model(batch())
        with torch.inference_mode():
            model(batch().detach())
        assert session.last_step is None
        assert session.cache.is_idle


def test_recomputation_inside_the_forward_is_not_packed(everything: Any) -> None:
    """Backward runs under the hooks when a module calls it in its own forward."""

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = checkpoint(self.inner, x, use_reentrant=False)
            return torch.autograd.grad(y.sum(), [x, *self.inner.parameters()])[0]

    whole, x = Whole(), batch()
    expected = whole(x)
    with ssdtrain.offload(whole, **everything) as session:
        assert same_bits(whole(x), expected)
        report = session.last_step
    assert report is not None
    # The checkpoint's own input is packed; what its recomputation saves is not.
    assert report.bytes_saved == x.nbytes


def test_exception_in_forward_leaves_the_session_usable(everything: Any) -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()
            self.fail = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.body(x)
            if self.fail:
                raise KeyboardInterrupt
            return y

    model, x = Failing(), batch()
    with ssdtrain.offload(model, **everything) as session:
        with pytest.raises(KeyboardInterrupt):
            model(x)
        gc.collect()
        assert session.cache.is_idle
        # The hooks are gone: an unrelated graph is not packed.
        (x * x).sum().backward()
        assert session.last_step is None
        model.fail = False
        model(x).sum().backward()
        assert session.last_step is not None


def test_backward_after_close_raises(everything: Any) -> None:
    model = mlp()
    session = ssdtrain.offload(model, **everything)
    loss = model(batch()).sum()
    session.close()
    session.close()
    with pytest.raises(SessionClosedError, match="closed before backward"):
        loss.backward()


def test_close_restores_every_attribute(everything: Any) -> None:
    model = mlp()
    before = dict(vars(model))
    session = ssdtrain.offload(model, **everything)
    assert "forward" in vars(model)
    model(batch()).sum().backward()
    session.close()
    assert vars(model) == before


def test_no_growth_over_steps(everything: Any, tmp_path: Any) -> None:
    model, before = mlp(num_layers=12), session_threads()
    settings = {
        "max_overhead": 0.01,
        **everything,
        "target": "ssd",
        "directory": str(tmp_path),
        "io_threads": 2,
    }
    with ssdtrain.offload(model, **settings) as session:
        levels = []
        for _ in range(6):
            model(batch()).sum().backward()
            assert session.cache.is_idle
            offloader = session.cache.offloader
            offloader.wait_io()
            stats = offloader.storage.stats()
            levels.append(
                (
                    offloader.pool.used_bytes,
                    stats.used_bytes,
                    stats.allocated_bytes,
                    session.cache.ledger.live_bytes,
                    len(session.cache._records),
                )
            )
            # How many buffers were in use at once depends on timing, never above all.
            assert offloader.pool.total_bytes <= session.steps[0].bytes_saved
        assert levels == [levels[0]] * 6, levels
        assert levels[-1][:2] == (0, 0)
        assert levels[-1][3:] == (0, 0)
        # Pools start their threads one by one: writers, readers, and two that copy.
        assert len(session_threads() - before) <= 2 * settings["io_threads"] + 2
    assert not list(tmp_path.iterdir())
    assert session_threads() <= before


@pytest.mark.parametrize("plan", ["keep-all", "offload-all", "saved"])
def test_steps_leave_no_objects(
    plan: str, everything: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of Python's, whatever the allocator makes of them; reports go one for one."""
    monkeypatch.setattr(hints, "MAX_REPORTS", 4)
    # Else up to so many references to members that are gone, by where they lay.
    monkeypatch.setattr(living, "FEWEST", 1)
    model, x = mlp(), batch()
    settings = {**everything, "plan": plan, "recompute": "auto"}
    if plan == "saved":  # served by a table
        settings["plan"] = str(tmp_path / "plan.json")
        searched = {**settings, "plan": "auto", "max_overhead": 1.0}
        with ssdtrain.offload(model, **searched) as session:
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
            while session.plan is None:
                model(x).sum().backward()
                optimizer.step()
            PLAN_FILE.write(tmp_path / "plan.json", session.plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    num_steps = 30
    with ssdtrain.offload(model, **settings) as session:
        counts = []
        for _ in range(3):
            for _ in range(num_steps):
                model(x).sum().backward()
                optimizer.step()
            # What a copy's thread still holds is no leak.
            session.cache.offloader.wait_io()
            gc.collect()
            counts.append(len(gc.get_objects()))
        assert len(session.steps) == 4
    assert counts[2] - counts[1] < num_steps // 2, counts


def test_saved_bytes_at_backward_start_are_the_window_and_the_kept(
    everything: Any,
) -> None:
    """12 layers. Each saves its input (Linear) and its pre-activation (GELU), every
    one 32 x 64 floats: 24 records of 8192 bytes. With a window of three, the last
    three are on the device when backward starts, and nothing else."""
    one = 32 * 64 * 4
    model = mlp(num_layers=12)
    settings = {**everything, "window_bytes": 3 * one, "prefetch_bytes": one}
    with ssdtrain.offload(model, **settings) as session:
        for _ in range(3):
            model(batch()).sum().backward()
            report = session.last_step
            assert report is not None
            assert report.bytes_saved == 24 * one
            assert report.saved_backward_start_bytes == 3 * one
        # From the second step on the tail is known and does not even start to leave.
        assert report.bytes_kept == 3 * one
        assert report.bytes_offloaded == 21 * one
        assert report.bytes_reloaded == 21 * one
        # In backward: the one in use, the one prefetched, never more than the start.
        assert report.saved_peak_bytes <= 4 * one


@pytest.mark.parametrize("recompute", ["auto", "regions"])
def test_a_session_that_nobody_closed_goes_with_its_model(recompute: str) -> None:
    """Hooks of torch that all optimizers share do not keep it."""

    def train() -> weakref.ref[nn.Module]:
        net = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        session = ssdtrain.offload(
            net, target="host", min_bytes=1, plan="offload-all", recompute=recompute
        )
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        net(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        assert session.cache.is_idle
        return weakref.ref(net)

    model = train()
    gc.collect()
    assert model() is None
