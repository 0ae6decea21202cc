"""Predictions of public models, and what they are compared with."""

import json
from pathlib import Path

import pytest

from recipes.bench.harness.cli import run
from recipes.bench.models import held_out
from ssdtrain.tools.report.build_public import Train
from ssdtrain.tools.report.public_models import PUBLIC

TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 211}


def test_a_model_is_foretold_and_then_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PUBLIC, "tiny", {"model_type": "llama", **TINY})
    monkeypatch.setattr(held_out, "HELD", (held_out.Held("tiny", Train.FULL, 8192),))
    monkeypatch.setattr(held_out, "answer_of", lambda work, given, *_: work(*given))
    out = tmp_path / "held.json"
    words = ["models.held_out", "--out", str(out), "--device", "cpu"]
    assert run([*words, "--foretell"]) == 0
    told = json.loads(out.read_text())["cells"]["tiny/full/8k"]["ways"]
    assert told["plain"]["foretold_ms"] < told["checkpointing"]["foretold_ms"]
    monkeypatch.setattr(held_out.Held, "name", "tiny/full/8k")
    shorter = held_out.Held("tiny", Train.FULL, 64)
    monkeypatch.setattr(held_out, "HELD", (shorter,))
    assert run(words) == 0
    found = json.loads(out.read_text())["cells"]["tiny/full/8k"]["ways"]
    assert all(found[way]["ms"] > 0 and "error" not in found[way] for way in told)
    assert found["plain"]["foretold_ms"] == told["plain"]["foretold_ms"]
    assert isinstance(found["ssdtrain"]["settled"], bool)
