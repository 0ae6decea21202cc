"""Impossible settings are refused with the field's name."""

from collections.abc import Callable

import pytest

from ssdtrain.errors import ConfigError
from ssdtrain.train.pipeline import choose_stages
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


@pytest.mark.parametrize(
    ("asked", "ranks", "stages"), [(None, 1, 1), (None, 2, 2), (None, 3, 1), (0, 2, 0)]
)
def test_stages(asked: int | None, ranks: int, stages: int) -> None:
    assert choose_stages(asked, ranks) == stages


def test_stages_must_divide_the_ranks() -> None:
    with pytest.raises(ConfigError, match=r"engine.num_stages=2 must divide.*got 3"):
        choose_stages(2, 3)
