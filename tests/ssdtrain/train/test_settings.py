"""Impossible settings are refused with the field's name."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ssdtrain.errors import ConfigError
from ssdtrain.train.engine import engine_config
from ssdtrain.train.pipeline import choose_stages
from ssdtrain.train.ranks import Ranks
from ssdtrain.train.settings import RunSettings

Make = Callable[..., RunSettings]


@pytest.mark.parametrize(
    ("group", "values", "message"),
    [
        ("model", {"family": "rnn"}, "model.family expects 'gpt'"),
        ("model", {"num_heads": 3}, "divisible by model.num_heads"),
        ("model", {"checkpointing": "yes"}, "model.checkpointing expects 'none'"),
        ("engine", {"kind": "horovod"}, "engine.kind expects 'plain', 'deepspeed'"),
        ("engine", {"zero_stage": 4}, "engine.zero_stage expects 0 to 3"),
        ("engine", {"zero_stage": 2}, "set engine.num_stages=0"),
        ("train", {"precision": "int8"}, "train.precision expects 'fp32'"),
        ("train", {"steps": 0}, "train.steps expects a number >= 1"),
        ("data", {"max_bytes": 0}, "data.max_bytes expects at least 1 bytes, got 0"),
    ],
)
def test_refused(tiny: Make, group: str, values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny(**{group: values})


def test_ones_own_deepspeed_settings_lie_over_the_implied_ones(tiny: Make) -> None:
    implied = engine_config(tiny())
    own: dict[str, Any] = {"zero_optimization": {"overlap_comm": True}}
    own |= {"fp16": None, "betas": [1, 2]}
    merged = {**implied["zero_optimization"], **own["zero_optimization"]}
    found = engine_config(tiny(engine={"config": own}))
    assert found == {**implied, **own, "zero_optimization": merged}


@pytest.mark.parametrize(
    ("asked", "ranks", "stages"), [(None, 1, 1), (None, 2, 2), (None, 3, 1), (0, 2, 0)]
)
def test_stages(asked: int | None, ranks: int, stages: int) -> None:
    assert choose_stages(asked, ranks) == stages


def test_stages_must_divide_the_ranks() -> None:
    with pytest.raises(ConfigError, match=r"engine.num_stages=2 must divide.*got 3"):
        choose_stages(2, 3)


def test_a_plan_that_is_not_there_is_told_before_anything_runs(
    tiny: Make, tmp_path: Path
) -> None:
    """It was told behind the whole run without ssdtrain."""
    missing, other = tmp_path / "none.json", tmp_path / "other.json"
    other.write_text("{}")
    for path, message in ((missing, "make one with `ssdtrain plan`"), (other, "other")):
        with pytest.raises(ConfigError, match=message):
            tiny(offload={"target": "host", "plan": str(path)})


def test_a_port_that_is_taken_is_told_in_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two runs at once, each with its launcher's port: it was a traceback."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        for name, value in {**place, "MASTER_PORT": str(port)}.items():
            monkeypatch.setenv(name, value)
        told = rf"at 127\.0\.0\.1:{port}, and cannot \(another process .*--master_port"
        with pytest.raises(ConfigError, match=told):
            Ranks.from_environment().join()
