"""The time, memory and bandwidth of one case, term by term."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdtrain.errors import ConfigError
from ssdtrain.tools.project.assumptions import Assumptions
from ssdtrain.tools.project.bubble import (
    bubble_fraction,
    bubble_over_ideal,
    layers_in_flight,
)
from ssdtrain.tools.project.layer import operators, saved_bytes
from ssdtrain.tools.project.model import (
    Case,
    Sharding,
    Throughput,
    gather_seconds,
    layer_seconds,
    project,
)
from ssdtrain.tools.project.tables import GPUS, MODELS, SSDS, find

ASSUME = Assumptions()
GPT = find(MODELS, "gpt-175b", "model")
A100 = find(GPUS, "a100-sxm", "GPU")


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


def test_zero3_communication_hides_until_it_is_longer() -> None:
    sharded = case(
        gpus=64, tensor=1, pipeline=1, batch=64, sharding=Sharding.ZERO3, tflops=100.0
    )
    gather = gather_seconds(sharded, ASSUME)
    assert gather == pytest.approx(2 * GPT.layer_parameters * 63 / 64 / 25e9)
    own = layer_seconds(replace(sharded, sharding=Sharding.NONE), ASSUME)
    assert layer_seconds(sharded, ASSUME) == max(own, gather)
    slow = replace(ASSUME, network_gb_per_s=1.0)
    assert layer_seconds(sharded, slow) == gather_seconds(sharded, slow) > own


def test_step_activations_and_bandwidth() -> None:
    one = case()
    found = project(one, ASSUME)
    assert one.micro_batches == 48 and one.layers_per_gpu == 8
    busy = layer_seconds(one, ASSUME) * 8 * 48
    assert found.forward_seconds == pytest.approx(busy * (1 + 11 / 48))
    assert found.step_seconds == 3 * found.forward_seconds
    saved = saved_bytes(GPT, one.split()) * 8 * 48
    assert found.activation_bytes == pytest.approx(saved)
    assert found.write_gb_per_s == pytest.approx(saved / (found.step_seconds / 2) / 1e9)
    measured = project(replace(one, throughput=Throughput.END_TO_END), ASSUME)
    busy = layer_seconds(measured.case, ASSUME) * 8 * 48
    assert measured.forward_seconds == pytest.approx(busy), "no bubble on top"


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


def test_gathered_weights_of_zero3_take_room() -> None:
    sharded = case(
        gpus=64, tensor=1, pipeline=1, batch=64, sharding=Sharding.ZERO3, tflops=100.0
    )
    two = replace(ASSUME, gathered_layers=2.0)
    more = project(sharded, two).state_bytes - project(sharded, ASSUME).state_bytes
    assert more == pytest.approx(2 * 2 * GPT.layer_parameters)


@settings(deadline=None, max_examples=50)
@given(stages=st.integers(1, 64), batches=st.integers(1, 512), chunks=st.integers(1, 8))
def test_bubbles(stages: int, batches: int, chunks: int) -> None:
    whole = bubble_fraction(stages, batches, chunks)
    ideal = bubble_over_ideal(stages, batches, chunks)
    assert whole == pytest.approx(ideal / (1 + ideal))
    assert 0 <= whole < 1
    assert bubble_fraction(stages, batches + 1, chunks) <= whole
    assert layers_in_flight(96, stages, 1) == 96
    if chunks > 1:
        expected = 96 * (1 + (stages - 1) / stages / chunks)
        assert layers_in_flight(96, stages, chunks) == pytest.approx(expected)


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


@pytest.mark.parametrize("arguments", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_impossible_pipelines(arguments: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match="pipeline expects"):
        bubble_fraction(*arguments)


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


def test_tables() -> None:
    # 174.6 and 529.6 billion parameters (Narayanan et al. 2021, Table 2).
    sizes = {m.name: m.parameters / 1e9 for m in MODELS}
    assert sizes["gpt-175b"] == pytest.approx(174.6, abs=0.05)
    assert sizes["gpt-530b"] == pytest.approx(529.6, abs=0.05)
    assert sizes["gpt-1t"] == pytest.approx(1008.0, abs=0.5)
    for table in (GPUS, SSDS, MODELS):
        names = [row.name for row in table]
        assert len(set(names)) == len(names)
    with pytest.raises(ConfigError, match="known: a100-pcie, a100-sxm"):
        find(GPUS, "k80", "GPU")
    with pytest.raises(ConfigError, match="layers expects 1"):
        replace(GPT, layers=0)
