"""The time, memory and bandwidth of one case, term by term."""

from typing import Any

import pytest

from ssdtrain.errors import ConfigError
from ssdtrain.tools.project.assumptions import Assumptions
from ssdtrain.tools.project.layer import operators, saved_bytes
from ssdtrain.tools.project.model import Case, Throughput, layer_seconds, project
from ssdtrain.tools.project.tables import GPUS, MODELS, find_row

ASSUME = Assumptions()
GPT = find_row(MODELS, "gpt-175b", "model")
A100 = find_row(GPUS, "a100-sxm", "GPU")


def case(**changes: Any) -> Case:
    values: dict[str, Any] = {
        "name": "case",
        "model": GPT,
        "gpu": A100,
        "gpus": 96,
        "tensor": 8,
        "pipeline": 12,
        "batch": 48,
        "micro_batch": 1,
        "tflops": 150.0,
    }
    return Case(**{**values, **changes})


def test_a_layer_is_the_sum_of_the_slower_of_compute_and_memory() -> None:
    one = case(throughput=Throughput.END_TO_END)
    ops = operators(GPT, one.split())
    bandwidth = 0.9 * 2039e9
    terms = [max(op.flops / 150e12, op.num_bytes / bandwidth) for op in ops]
    assert layer_seconds(one, ASSUME) == pytest.approx(sum(terms))
    # Norms, GELU and dropouts are bound by memory, products by compute.
    bound = {op.name for op in ops if op.num_bytes / bandwidth > op.flops / 150e12}
    assert bound == {op.name for op in ops if op.flops == 0}
    # Kernel throughput adds the all-reduces.
    kernel = layer_seconds(case(), ASSUME)
    state = 2 * 2048 * 12288
    assert kernel - sum(terms) == pytest.approx(2 * 2 * 7 / 8 * state / 300e9)


def test_largest_micro_batch_fits_and_one_more_does_not() -> None:
    one = case()
    found = project(one, ASSUME)
    assert found.state_bytes == pytest.approx(16 * GPT.parameters / 96)
    layer = saved_bytes(GPT, one.split(1))
    room = 80e9 - found.state_bytes
    largest = found.largest_micro_batch
    assert 2 * largest * layer <= room < 2 * (largest + 1) * layer
    rounded = found.largest_micro_batch_power_of_two
    assert rounded <= largest < 2 * rounded and rounded & (rounded - 1) == 0
    assert found.largest_in_flight_bytes == pytest.approx(largest * layer * 96)
    crowded = project(case(pipeline=1, gpus=8, batch=1), ASSUME)
    assert crowded.largest_micro_batch == 0
    assert crowded.largest_micro_batch_power_of_two == 0


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"gpus": 95}, "no multiple"),
        ({"tensor": 0}, "1 or more"),
        ({"batch": 0}, "1 or more"),
        ({"gpus": 960, "batch": 8, "micro_batch": 2}, "less than one micro-batch"),
        ({"tflops": 0.0}, "more than 0"),
    ],
)
def test_impossible_cases(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        case(**changes)


def test_assumptions_are_named_and_checked() -> None:
    changed = ASSUME.changed(["retention_factor=86", "gathered_layers=0"])
    assert changed.endurance_factor == pytest.approx(2.5 * 86)
    for setting, word in (
        ("retention=86", "names: rated_write"),
        ("write_window", "NAME=VALUE"),
        ("write_window=fast", "a number"),
        ("write_window=0", "more than 0"),
        ("gathered_layers=-1", "0 or more"),
    ):
        with pytest.raises(ConfigError, match=word):
            ASSUME.changed([setting])
