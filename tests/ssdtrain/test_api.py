"""Bad input gets an error that names the field and what to set."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ssdtrain
from ssdtrain.errors import AttachError, ConfigError
from tests.ssdtrain.cache.plans import moved_in_front
from tests.ssdtrain.targets import TARGETS


def model() -> nn.Module:
    return nn.Linear(4, 4)


CASES: list[tuple[dict[str, Any], str]] = [
    ({"max_overhead": 0.01, "target": "ssd"}, "needs a directory"),
    (
        {"max_overhead": 0.01, "target": "tape"},
        f"target expects {', '.join(map(repr, TARGETS))}, got 'tape'",
    ),
    (
        {"max_overhead": 0.01, "target": "ssd", "directory": "/nowhere/at/all"},
        "/nowhere/at/all",
    ),
    ({"host_bytes": 1 << 60}, "host_bytes"),
    ({"host_bytes": 0}, "host_bytes expects at least 1 bytes, got 0"),
    (
        {"max_overhead": 0.01, "min_bytes": -1},
        "min_bytes expects at least 0 bytes, got -1",
    ),
    ({"plan": "sometimes"}, "plan expects"),
    ({"max_overhead": -0.5}, "max_overhead expects a fraction"),
    ({"tarjet": "host"}, "unknown setting 'tarjet'; did you mean 'target'?; known:"),
]


@pytest.mark.parametrize(("settings", "text"), CASES)
def test_impossible_settings(settings: dict[str, Any], text: str) -> None:
    linear = model()
    before = dict(vars(linear))
    with pytest.raises(ConfigError) as caught:
        ssdtrain.offload(linear, **settings)
    assert text in str(caught.value)
    assert vars(linear) == before


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: nn.ReLU(), "no parameter"),
        (lambda: "gpt2", "expects an nn.Module"),
        (lambda: [], "empty list"),
    ],
)
def test_impossible_models(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(AttachError, match=text):
        ssdtrain.offload(make(), max_overhead=0.01, target="host")


def test_offload_twice_is_refused() -> None:
    linear = model()
    with ssdtrain.offload(linear, max_overhead=0.01, target="host"):
        with pytest.raises(AttachError, match="already offloaded"):
            ssdtrain.offload(linear, max_overhead=0.01, target="host")
        linear(torch.ones(2, 4)).sum().backward()
    with ssdtrain.offload(linear, max_overhead=0.01, target="host"):
        pass


def test_read_only_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="directory"):
        ssdtrain.offload(
            model(), max_overhead=0.01, target="ssd", directory=str(tmp_path / "file")
        )


def test_default_is_host_only_without_a_directory() -> None:
    with ssdtrain.offload(model(), max_overhead=0.01) as session:
        assert session.cache.offloader.storage is None


def test_configuration_object_and_overrides(tmp_path: Path) -> None:
    config = ssdtrain.OffloadConfig(target="host", min_bytes=5)
    with ssdtrain.offload(model(), config, min_bytes=7) as session:
        assert session.cache.limits.min_bytes == 7


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"plan": "offload-all"}, "a saved tensor of at least min_bytes=1048576."),
        ({"plan": "offload-all", "min_bytes": 0}, "plan='offload-all', no prediction"),
        ({"plan": "keep-all", "min_bytes": 0}, "plan='keep-all' moves nothing"),
        ({}, "a saved tensor of at least min_bytes=1048576. plan='auto' runs a step"),
    ],
)
def test_explain_is_true_without_a_plan(settings: dict[str, Any], told: str) -> None:
    """Fixed policies never plan, and a tiny model has nothing to plan."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4))
    with ssdtrain.offload(net, target="host", **settings) as session:
        for _ in range(4):
            net(torch.randn(2, 4)).sum().backward()
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.add_(0)
        text = session.explain()
    assert told in text
    assert "observes" not in text or "plan" not in settings


@pytest.mark.parametrize(
    ("settings", "hooked"),
    [
        ({}, False),
        ({"verify": "checksum"}, True),
        ({"recompute": "auto"}, True),
        ({"plan": "offload-all"}, True),
    ],
)
def test_where_nothing_is_to_happen_there_are_no_hooks(
    settings: dict[str, Any], hooked: bool
) -> None:
    """Steps are counted all the same, and the reason is told."""
    found: list[bool] = []

    class Watched(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
            found.append(hooks is not None)
            return super().forward(x)

    net = nn.Sequential(Watched(4, 4), nn.Sigmoid())
    x = torch.randn(2, 4, requires_grad=True)
    net(x).sum().backward()
    theirs, x.grad = x.grad, None
    keep = {"plan": "keep-all", "recompute": "off", "min_bytes": 0}
    with ssdtrain.offload(net, target="host", **{**keep, **settings}) as session:
        net(x).sum().backward()
        session.hints.step_end()
        report, told = session.last_step, session.explain()
    assert found == [False, hooked]
    assert theirs is not None and x.grad is not None and torch.equal(theirs, x.grad)
    assert report is not None and (report.bytes_saved > 0) == hooked
    assert hooked or "plan='keep-all' moves nothing" in told


def test_a_plan_is_followed_where_there_were_no_hooks() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    common: dict[str, Any] = {
        "max_overhead": 0.01,
        "target": "host",
        "min_bytes": 0,
        "recompute": "off",
    }

    def step() -> list[torch.Tensor]:
        net.zero_grad()
        net(torch.linspace(-1, 1, 32 * 8).view(32, 8)).sum().backward()
        return [p.grad.clone() for p in net.parameters() if p.grad is not None]

    expected = step()
    with ssdtrain.offload(net, plan="auto", **common) as session:
        for _ in range(4):
            step()
            session.hints.step_end()
        plan = moved_in_front(session, 4)
    with ssdtrain.offload(net, plan="keep-all", **common) as session:
        step()
        session.hints.step_end()
        session.follow(plan)
        found = step()
        session.hints.step_end()
        report = session.last_step
    assert report is not None and report.bytes_offloaded > 0
    assert all(map(torch.equal, found, expected))


def test_shares_of_memory_are_resolved() -> None:
    """Four times the share is four times the pool, but for what others took."""
    caps = []
    for share in ("10%", "40%"):
        with ssdtrain.offload(
            model(), max_overhead=0.01, target="host", host_bytes=share
        ) as session:
            caps.append(session.cache.offloader.pool.cap_bytes)
    assert 2 < caps[1] / caps[0] < 8


@pytest.mark.parametrize(
    ("name", "package", "home"),
    [
        ("OffloadCallback", "transformers", "ssdtrain.train.callback"),
        ("LightningCallback", "lightning", "ssdtrain.train.lightning_callback"),
    ],
)
def test_a_callback_without_its_framework_says_what_to_install(
    name: str, package: str, home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [m for m in sys.modules if m.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, home, raising=False)
    with pytest.raises(ImportError, match=f"is for {package}.*pip install {package}"):
        getattr(ssdtrain, name)


def test_a_session_shows_what_it_does() -> None:
    """A notebook shows it."""
    linear = model()
    with ssdtrain.offload(
        linear, max_overhead=0.01, target="host", min_bytes=0
    ) as session:
        assert repr(session) == "<Session target='host', observing, steps ended: 0>"
    with ssdtrain.offload(linear, target="host", plan="offload-all") as session:
        assert "plan='offload-all', steps ended: 0" in repr(session)
