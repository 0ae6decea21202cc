"""Figures of ssdtrain in the log that a training loop keeps anyway."""

from types import SimpleNamespace
from typing import Any

import pytest

import ssdtrain
from ssdtrain.counters import FIGURES, figures_of
from tests.ssdtrain.tiny_models import tanhs, train

SETTINGS = {"target": "host", "plan": "offload-all", "min_bytes": 1, "window_bytes": 1}


def test_the_trainers_log_has_them(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    callback, model = ssdtrain.OffloadCallback(**SETTINGS), tanhs()
    state = SimpleNamespace(
        global_step=0, log_history=[{"loss": 1.0}], is_world_process_zero=True
    )
    assert callback.summary() == ""
    callback.on_train_begin(None, state, None, model=model)
    logs: dict[str, Any] = {"loss": 1.0}
    callback.on_log(None, state, None, logs=logs)
    assert logs == {"loss": 1.0}  # no report is built, and none is waited for
    train(model, model.parameters(), 6)
    callback.on_log(None, state, None, logs=logs)
    evaluated = {"eval_loss": 1.0}
    callback.on_log(None, state, None, logs=evaluated)
    assert evaluated == {"eval_loss": 1.0}
    assert capsys.readouterr().out == ""
    callback.on_train_end(None, state, None)
    told = capsys.readouterr().out
    assert told == f"{callback.summary()}\n" and told.startswith("Memory: at most ")
    callback.on_train_end(None, state, None)
    assert capsys.readouterr().out == ""
    assert set(logs) == {"loss", *(f"ssdtrain/{name}" for name in FIGURES)}
    assert logs["ssdtrain/bytes_offloaded"] > 0
    assert state.log_history[-1] == logs


def test_lightnings_loggers_have_them() -> None:
    pytest.importorskip("lightning")
    callback, model = ssdtrain.LightningCallback(**SETTINGS), tanhs()
    found: dict[str, float] = {}
    model.log_dict = found.update  # type: ignore[assignment]
    trainer = SimpleNamespace(loggers=[])
    callback.on_train_start(trainer, model)
    train(model, model.parameters(), 6)
    callback.on_train_batch_end(trainer, model, None, None, 0)
    assert not found
    trainer.loggers.append("a logger")
    callback.on_train_batch_end(trainer, model, None, None, 0)
    callback.on_train_end(trainer, model)
    assert found["ssdtrain/bytes_offloaded"] > 0


def test_nothing_is_known_before_the_first_report() -> None:
    assert figures_of(None) == {}


def test_any_loop_may_log_them() -> None:
    model = tanhs()
    with ssdtrain.offload(model, **SETTINGS) as session:
        assert session.figures == {}
        train(model, model.parameters(), 6)
        found = session.figures
    assert set(found) == {f"ssdtrain/{name}" for name in FIGURES}
    assert found["ssdtrain/bytes_offloaded"] > 0
