"""The model benchmark's cells on a CPU: the same paths, tiny sizes."""

from types import SimpleNamespace

import pytest
import torch

from recipes.bench.harness import blocks

CPU = torch.device("cpu")


def test_steps_in_which_a_session_settles_are_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plain steps, and steps that run everything again, come before its first plan."""
    told = iter([True, True, True, False, False, False])
    size = blocks.Size(64, 1, 2, 16)
    plain = blocks.Steps(size, CPU).measured(3)
    ours = blocks.Steps(size, CPU).measured(3, lambda: next(told))
    assert (plain["num_warm_up"], ours["num_warm_up"]) == (0, 3)
    assert len(ours["losses"]) == 3
    now = iter([0.0, 1.0, 2.0, 9.0, 9.0])
    clock = SimpleNamespace(monotonic=lambda: next(now))
    monkeypatch.setattr(blocks, "time", clock)
    settles = blocks.settling(SimpleNamespace(is_settled=False), 5.0)
    assert [settles() for _ in range(3)] == [True, True, False]
    assert not blocks.settling(None, 5.0)()
