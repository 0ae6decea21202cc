"""A disk dies in the middle of training: the stripe goes on, and so does the step."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ssdtrain
from ssdtrain.counters import Fallback
from ssdtrain.storage import PosixStorage
from ssdtrain.storage import open as opening
from ssdtrain.storage.stripe import StripeStorage
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.faulty import Fault, FaultKind, FaultyStorage, Operation
from tests.ssdtrain.mlp import mlp

NUM_STEPS = 4


def losses(model: nn.Module, session: ssdtrain.Session | None) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen = []
    for step in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(step)
        loss = model(torch.randn(64, 64, generator=generator)).square().mean()
        if session is not None:
            session.cache.offloader.wait_io()  # what is read comes from the disks
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach().clone())
    return [*seen, *(p.detach().clone() for p in model.parameters())]


@pytest.mark.parametrize("dies_at", [0, 7, 20])
def test_training_goes_on_when_a_member_dies(
    dies_at: int,
    tmp_path: Path,
    everything: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    places = [tmp_path / "a", tmp_path / "b"]
    for place in places:
        place.mkdir(mode=0o700)
    dead = Fault(
        operation=Operation.WRITE, kind=FaultKind.IO_ERROR, at=dies_at, count=10**9
    )
    stripes: list[StripeStorage] = []

    def open_stripe(paths: list[Path], **options: Any) -> StripeStorage:
        good, bad = (PosixStorage(place, extent_bytes=1 << 20) for place in paths)
        members = [good, FaultyStorage(bad, [dead])]
        stripes.append(StripeStorage(members, on_fallback=options["on_fallback"]))
        return stripes[0]

    monkeypatch.setattr(opening, "open_storage", open_stripe)
    expected = losses(mlp(6), None)
    net = mlp(6)
    directories = tuple(map(str, places))
    settings = {
        "max_overhead": 0.01,
        **everything,
        "target": "ssd",
        "directory": directories,
    }
    with caplog.at_level(logging.WARNING), ssdtrain.offload(net, **settings) as session:
        found = losses(net, session)
        lost = [member.why_lost for member in stripes[0].members]
        counts = [step.fallbacks for step in session.steps]
    assert same_bits(found, expected)
    assert not lost[0] and lost[1]
    told = Fallback.STRIPE_MEMBER_LOST.value
    assert sum(step.get(told, 0) for step in counts) == 1
    kept = (Fallback.KEPT_WRITE_FAILED.value, Fallback.KEPT_STORAGE_FULL.value)
    assert not any(step.get(name, 0) for step in counts for name in kept)
    assert caplog.text.count("leaves the stripe (1 left)") == 1
