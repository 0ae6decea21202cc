"""A GPT that trains in a blink, and a text to train it on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ssdtrain.train.settings import RunSettings

TINY_MODEL = {
    "family": "gpt",
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 2,
    "sequence_length": 16,
}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(chr(33 + i * 7 % 90) for i in range(4000)))
    return path


@pytest.fixture
def tiny(tmp_path: Path, text: Path) -> Callable[..., RunSettings]:
    """RunSettings from `group={...}` changes of a tiny plain run."""

    def make(**groups: dict[str, Any]) -> RunSettings:
        directory = groups.get("offload", {}).get("directory")
        if directory and "{" not in directory:
            Path(directory).mkdir(exist_ok=True)
        values: dict[str, Any] = {
            "run_directory": str(tmp_path / "run"),
            "model": {**TINY_MODEL, **groups.get("model", {})},
            "engine": {"kind": "plain", **groups.get("engine", {})},
            "data": {
                "files": [str(text)],
                "cache_directory": str(tmp_path / "cache"),
                **groups.get("data", {}),
            },
            "train": {
                "steps": 3,
                "micro_batch_size": 2,
                "num_micro_batches": 2,
                "tensorboard": False,
                **groups.get("train", {}),
            },
            "offload": groups.get("offload", {}),
        }
        return RunSettings.from_mapping(values)

    return make
