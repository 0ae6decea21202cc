"""The zoo's campaign: its processes, its file, and the table."""

import json
from pathlib import Path
from typing import Any

import pytest

from recipes.bench.harness.cli import run as bench
from recipes.bench.harness.processes import TOO_LONG
from recipes.bench.safety import zoo
from recipes.bench.safety.tables import zoo as table

EQUAL = {"verdict": "equal", "bytes": {"regions": 8}}


def test_it_goes_on_and_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "zoo_cpu.json"
    calls: list[str] = []

    def judge(name: str) -> dict[str, Any]:
        calls.append(name)
        if name.endswith("bert"):
            return {"verdict": "equal", "variants": {"regions": EQUAL}}
        return {"verdict": "plain fails", "why": "Unfit: it requires the xyz library"}

    monkeypatch.setattr(zoo, "judge", judge)
    names = ["transformers/bert", "transformers/xyz"]
    monkeypatch.setattr(zoo, "names_of", lambda library: names)

    def run(*words: str) -> list[str]:
        calls.clear()
        base = ["--out", str(out), "--library", "transformers"]
        bench(["safety.zoo", *base, *words])
        return sorted(calls)

    assert run("--workers", "2") == names
    assert run() == []
    assert run("--verdicts", "plain fails") == names[1:]
    assert run("--models", names[0]) == names[:1]
    assert list(json.loads(out.read_text())["cells"]) == names[::-1]


def test_a_process_that_ends_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    found = zoo.judge("transformers/there is no such type")
    assert found["verdict"] == "plain fails"
    monkeypatch.setattr(zoo, "LIMIT_S", 0.0)
    assert zoo.judge("transformers/bert") == {"verdict": "crash", "why": TOO_LONG}


def test_the_table_counts_and_gives_reasons() -> None:
    different = {"verdict": "different", "why": "step 3: other loss"}
    refused = {"verdict": "refused", "why": "step 0: RegionError: because"}
    cells = {
        "timm/a": {"verdict": "equal", "variants": {"regions": EQUAL, "no region": []}},
        "timm/b": {"verdict": "different", "variants": {"ssd": different}},
        "timm/c": {"verdict": "refused", "variants": {"ssd": refused}},
        "timm/d": {"verdict": "crash", "why": "took more than 600 s"},
        "timm/e": {"verdict": "unmoved", "variants": {}},
        "timm/f": {"verdict": "plain fails", "why": "requires the xyz library"},
        "timm/g": {"verdict": "plain fails", "why": "RuntimeError: shapes"},
    }
    environment = {"device": "2 CPU cores", "num_devices": 0, "versions": {}}
    text = table({"cells": cells, "environment": environment})
    assert "| timm | 7 | 5 | 1 | 1 | 1 | 1 | 2 | 2 |" in text
    assert "timm/b: different: step 3: other loss" in text
    assert "timm/c: refused: step 0: RegionError: because" in text
    assert "timm/d: crash: took more than 600 s" in text
    assert "needs a library that is not there: f" in text
    assert "no tiny configuration or inputs for it were found: g" in text
