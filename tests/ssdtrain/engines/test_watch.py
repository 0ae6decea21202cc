"""A session that does nothing says so, once, and what to pass or to set."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ssdtrain
from ssdtrain.engines import watch
from ssdtrain.errors import AttachError
from tests.ssdtrain.tiny_models import gpt2, tanhs, train


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    texts = [record.getMessage() for record in caplog.records]
    return [text for text in texts if "nothing is offloaded" in text]


CASES: list[tuple[dict[str, Any], str | None]] = [
    ({"plan": "offload-all", "min_bytes": 1 << 20}, "min_bytes"),
    ({"max_overhead": 0.01, "plan": "auto", "min_bytes": 1 << 20}, "min_bytes"),
    ({"plan": "keep-all", "min_bytes": 1}, None),
    ({"plan": "offload-all", "min_bytes": 1, "window_bytes": 1}, None),
]


@pytest.mark.parametrize(("settings", "text"), CASES)
def test_the_reason_is_told_once(
    settings: dict[str, Any], text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    model = tanhs()
    with (
        caplog.at_level(logging.WARNING),
        ssdtrain.offload(model, target="host", recompute="off", **settings) as session,
    ):
        train(model, model.parameters(), 12)
        _ = session.steps
    found = told(caplog)
    if text is None:
        assert not found
    else:
        (one,) = found
        assert f"set {text} lower" in one


def test_a_session_with_nothing_to_plan_is_settled() -> None:
    """Who waits for `is_settled` before a capture waits for three steps."""
    model = tanhs()
    with ssdtrain.offload(
        model, max_overhead=0.01, target="host", plan="auto"
    ) as session:
        train(model, model.parameters(), 2)
        assert not session.is_settled
        assert not session.can_capture
        train(model, model.parameters(), 1)
        assert session.is_settled and session.can_capture
        assert session.plan is None


def test_another_object_runs(caplog: pytest.LogCaptureFixture) -> None:
    """The loop calls a part of what was offloaded."""

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = tanhs()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.part(x)

    model = Whole()
    with (
        caplog.at_level(logging.WARNING),
        ssdtrain.offload(model, max_overhead=0.01, target="host"),
    ):
        train(model.part, model.parameters(), 8)
    (text,) = told(caplog)
    assert "no forward of the Whole" in text
    assert "pass the object that the loop calls" in text


def test_every_forward_is_transformed(caplog: pytest.LogCaptureFixture) -> None:
    model, x = tanhs(), torch.randn(8, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        caplog.at_level(logging.WARNING),
        ssdtrain.offload(model, max_overhead=0.01, target="host"),
    ):
        for _ in range(4):
            torch.vmap(model)(x).sum().backward()
            optimizer.step()
    (text,) = told(caplog)
    assert "a transform of torch.func ran every forward" in text


def held(caplog: pytest.LogCaptureFixture) -> list[str]:
    texts = [record.getMessage() for record in caplog.records]
    return [text for text in texts if "no step is reported or planned" in text]


def test_a_loss_that_is_kept_holds_up_the_reports(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An evaluation without `no_grad` whose losses are collected: no step ended any
    more, no plan was made, and nobody said so."""
    model, kept = tanhs(), []
    with (
        caplog.at_level(logging.WARNING),
        ssdtrain.offload(
            model, max_overhead=0.01, target="host", min_bytes=1
        ) as session,
    ):
        kept.append(model(torch.randn(8, 32)).sum())
        train(model, model.parameters(), 3)
        assert not held(caplog)
        train(model, model.parameters(), 4)
        (text,) = held(caplog)
        assert "torch.no_grad()" in text and "loss.item()" in text
        assert "torch.no_grad()" in session.explain()
        kept.clear()
        train(model, model.parameters(), 6)
        assert len(session.steps) > 4 and session.plan is not None
        assert "torch.no_grad()" not in session.explain()
    assert len(held(caplog)) == 1


def test_forwards_of_one_step_hold_nothing_up(caplog: pytest.LogCaptureFixture) -> None:
    """Several of them before their backwards, and schedules that say where a step ends
    while the next one has begun."""
    model = tanhs()
    # Fused: autograd does not mind that weights change between forward and backward.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    with (
        caplog.at_level(logging.WARNING),
        ssdtrain.offload(
            model, max_overhead=0.01, target="host", min_bytes=1
        ) as session,
    ):
        for _ in range(6):
            sum(model(torch.randn(8, 32)).sum() for _ in range(5)).backward()
            optimizer.step()
        ahead = model(torch.randn(8, 32)).sum()
        for _ in range(6):
            following = model(torch.randn(8, 32)).sum()
            ahead.backward()
            optimizer.step()
            session.hints.step_end()
            ahead = following
    assert not held(caplog)


def test_who_runs_now_and_then_is_not_blamed(caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = tanhs(), tanhs()
    with (
        caplog.at_level(logging.WARNING),
        ssdtrain.offload(ours, max_overhead=0.01, target="host"),
    ):
        train(theirs, theirs.parameters(), 8)
    assert not told(caplog)


def test_a_model_that_moves_behind_offload_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tanhs()
    with ssdtrain.offload(model, max_overhead=0.01, target="host"):
        elsewhere = torch.device("cuda", 0)
        monkeypatch.setattr(watch, "device_of", lambda _: elsewhere)
        with pytest.raises(AttachError, match=r"was on cpu .* on cuda:0 now"):
            model(torch.randn(8, 32))


def test_what_is_no_model_is_told_what_to_pass() -> None:
    from accelerate import Accelerator

    model = tanhs()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cases: list[tuple[Any, str]] = [
        (Accelerator(), "accelerator.prepare"),
        (optimizer, "the model that it trains"),
        (SimpleNamespace(), "pass the model itself"),
        ([], "empty list"),
        (nn.Linear(2, 2, device="meta"), "meta device"),
    ]
    for given, text in cases:
        with pytest.raises(AttachError, match=text):
            ssdtrain.offload(given, max_overhead=0.01)


def hinted(caplog: pytest.LogCaptureFixture, words: str) -> int:
    return sum(words in record.getMessage() for record in caplog.records)


def test_gradient_checkpointing_is_told_with_what_to_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = gpt2(2, 32, 16, 64)
    switch = "activation_checkpointing_{}"  # transformers 5.2 and later
    if not hasattr(model, switch.format("enable")):
        switch = "gradient_checkpointing_{}"
    getattr(model, switch.format("enable"))()
    tokens = torch.zeros(1, 16, dtype=torch.long)
    with ssdtrain.offload(model, max_overhead=0.01, target="host") as session:
        model(tokens, labels=tokens).loss.backward()
        assert "leave out gradient_checkpointing_enable()" in session.summary()
    assert hinted(caplog, "gradient checkpointing is on in GPT2") == 1
    getattr(model, switch.format("disable"))()
    with ssdtrain.offload(model, max_overhead=0.01, target="host") as session:
        model(tokens, labels=tokens).loss.backward()
        assert "gradient_checkpointing" not in session.summary()


@pytest.mark.parametrize("inner_first", [True, False])
def test_sessions_inside_one_another_are_told(
    inner_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    inner, other = tanhs(), tanhs()
    outer = nn.ModuleDict({"inner": inner})
    pair = [inner, outer] if inner_first else [outer, inner]
    with (
        ssdtrain.offload(pair[0], max_overhead=0.01),
        ssdtrain.offload(other, max_overhead=0.01),
    ):
        assert not hinted(caplog, "two sessions")
        with ssdtrain.offload(pair[1], max_overhead=0.01) as session:
            assert "on a ModuleDict and on a Sequential inside" in session.summary()
    assert hinted(caplog, "two sessions are open") == 1
    with ssdtrain.offload(inner, max_overhead=0.01):  # the others are closed
        assert hinted(caplog, "two sessions are open") == 1


def test_forwards_without_a_backward_are_told(caplog: pytest.LogCaptureFixture) -> None:
    model, words = tanhs(), "no backward has asked for what they saved"
    with ssdtrain.offload(model, max_overhead=0.01, min_bytes=0) as session:
        for _ in range(watch.NUM_FORWARDS):
            model(torch.randn(8, 32))
        assert "torch.no_grad()" in session.summary()
    assert hinted(caplog, words) == 1
    for min_bytes in (0, 1 << 20):  # accumulation, tensors large and small
        with ssdtrain.offload(model, max_overhead=0.01, min_bytes=min_bytes):
            for _ in range(2 * watch.NUM_FORWARDS):
                model(torch.randn(8, 32)).sum().backward()
        model.zero_grad()
    assert hinted(caplog, words) == 1
