"""A run of a second, and commands that are refused."""

from collections.abc import Callable
from pathlib import Path

import pytest

from ssdtrain.tools.cli import main

ROOT = Path(__file__).resolve().parents[4]
TINY = (
    "engine=plain",
    "offload=host",
    "size.hidden_size=32",
    "size.num_layers=2",
    "size.num_heads=2",
    "size.sequence_length=16",
    f"data.files=[{ROOT / 'README.md'}]",  # Python's own sources take a second to list
    "train.tensorboard=false",
)

Refused = Callable[..., str]


@pytest.fixture
def refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Refused:
    """What a command that cannot work says, in a directory of its own."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> str:
        assert main(words) == 2
        error = capsys.readouterr().err
        assert "Traceback" not in error
        return error

    return run
