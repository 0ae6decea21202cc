"""Dispatch modes are counted while a session listens, and torch is left as it was."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

import ssdtrain
from ssdtrain.rebuild.modes import ASKED, ENTRIES, Entries, without_modes


class Seeing(TorchDispatchMode):
    """Writes down what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_entries_are_counted_while_somebody_listens() -> None:
    before, entries = _python_dispatch._push_mode, Entries()
    first, second = entries.listen(), entries.listen()
    with Seeing(), Seeing():
        assert ASKED[0]() == 2
    first()
    with Seeing():
        pass
    assert entries.num == 3
    second()
    assert _python_dispatch._push_mode is before
    with Seeing():
        pass
    assert entries.num == 3


def test_whoever_wraps_ours_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before, entries = _python_dispatch._push_mode, Entries()
    stop = entries.listen()
    ours = _python_dispatch._push_mode
    monkeypatch.setattr(_python_dispatch, "_push_mode", lambda mode: ours(mode))
    stop()
    with Seeing():
        pass
    assert entries.num == 1
    monkeypatch.undo()
    entries.listen()()
    assert _python_dispatch._push_mode is before


def test_without_modes_nothing_is_seen() -> None:
    with Seeing() as mode:
        before = ENTRIES.num
        with without_modes():
            torch.ones(2).exp()
        assert ENTRIES.num > before and ASKED[0]() == 1
    assert not mode.seen


@pytest.mark.parametrize("plan", ["keep-all", "offload-all", "auto"])
def test_a_mode_sees_what_it_sees_without_ssdtrain(plan: str) -> None:
    """Counters of operators count the model's own, forward and backward."""

    def seen(session: bool) -> list[list[str]]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        offload = ssdtrain.offload(net, target="host", min_bytes=0, plan=plan)
        found = []
        with offload if session else Seeing():
            for step in range(5):
                with Seeing() as mode:
                    net(torch.ones(4, 8)).sum().backward()
                net.zero_grad()
                found.append(mode.seen if step != 2 else [])
        offload.close()
        return found

    assert seen(True) == seen(False)
