"""Layouts: what they cost, which fit, and what launches them."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from ssdtrain.errors import ConfigError
from ssdtrain.tools.cli import main
from ssdtrain.tools.foresight.collectives import Collective
from ssdtrain.tools.foresight.spec import H100
from ssdtrain.tools.report.build_public import Loss, Train, shape_of
from ssdtrain.tools.search.launch import configurations
from ssdtrain.tools.search.layout_search import Asked, Ranked
from ssdtrain.tools.search.parallel_layout import (
    Job,
    ParallelLayout,
    Pricer,
    layouts,
)
from ssdtrain.tools.search.search_command import lines, to_json
from ssdtrain.tools.search.stage_costs import (
    PerLayer,
    StageCosts,
    part_of,
    tensor_degrees,
)
from ssdtrain.tools.search.tiers import cluster_of

JOB = Job(layers=32, hidden=4096, tokens=8192, batch=64, gpus=16)
SMALL = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
}


def costs(degree: int) -> StageCosts:
    return StageCosts(
        milliseconds={"plain": PerLayer(layer=30.0 / degree, ends=50.0 / degree)},
        activation_bytes={"plain": PerLayer(layer=1e9 / degree, ends=4e9)},
        parameters=PerLayer(layer=2e8 / degree, ends=1e9 / degree),
    )


def pricer(fabric: str = "nvlink:8,ib:400G") -> Pricer:
    return Pricer(
        job=JOB,
        spec=H100,
        cluster=cluster_of(fabric, H100),
        capacity_bytes=80e9,
        costs={(degree, 1): costs(degree) for degree in (1, 2, 4, 8)},
    )


def layout(**more: int) -> ParallelLayout:
    plain = {"data": 1, "tensor": 1, "pipeline": 1, "zero": 0, "sequences": 1}
    return ParallelLayout(**{**plain, **more}, way="plain")


def test_all_layouts_use_all_gpus() -> None:
    found = list(layouts(JOB, [1, 2, 4, 8], [1, 2], ["plain"]))
    assert len(found) == len(set(found)) > 50
    for one in found:
        assert one.data * one.tensor * one.pipeline == 16
        assert one.micro_batches(64) * one.data * one.sequences == 64


def test_memory_is_divided() -> None:
    """Weights 2, gradients 4 and optimizer 12 bytes, each from its level on."""
    price = pricer().price
    held = [price(layout(data=16, zero=zero)).memory_bytes for zero in range(4)]
    parameters = 32 * 2e8 + 1e9
    saved = [before - after for before, after in pairwise(held)]
    gathered = 2 * 2e8 * 2
    expected = [parameters * size * 15 / 16 for size in (12, 4, 2)]
    expected[2] -= gathered
    assert saved == pytest.approx(expected)
    assert [price(layout(data=16, zero=z)).fits for z in (0, 3)] == [False, True]


def test_a_pipeline_holds_micro_batches_and_waits() -> None:
    one = pricer().price(layout(data=4, pipeline=4, zero=1))
    assert one.parts_ms["compute"] == pytest.approx(16 * (8 * 30 + 50))
    assert one.parts_ms["pipeline bubble"] >= 3 * (8 * 30 + 50)
    states = (8 * 2e8 + 1e9) * (2 + 4 + 12 / 4)
    assert one.memory_bytes == pytest.approx(states + 4 * 8 * 1e9 + 4e9)


def test_links_between_nodes_are_slower() -> None:
    cluster = cluster_of("nvlink:8,ib:400G", H100)
    kind, size = Collective.ALL_GATHER, 1e9
    near = cluster.microseconds(kind, size, 8)
    far = cluster.microseconds(kind, size, 16)
    apart = cluster.microseconds(kind, size, 2, stride=8)
    assert near < far < apart
    assert cluster.send_us(1e8, 1) < cluster.send_us(1e8, 8)
    with pytest.raises(ConfigError, match="links between nodes"):
        cluster_of("nvlink:8", H100).microseconds(kind, size, 16)
    for text in ("nvlink", "nvlink:8,ib", "a:1,b:2G,c:3G", "nvlink:0"):
        with pytest.raises(ConfigError, match="--fabric expects"):
            cluster_of(text, H100)


def test_parts_of_a_decoder() -> None:
    shape = shape_of("llama-3.1-8b", Train.FULL, Loss.STOCK)
    assert tensor_degrees(shape, 8) == [1, 2, 4, 8]
    part = part_of(shape, 8).values
    assert part["num_attention_heads"] == 4 and part["num_key_value_heads"] == 1
    assert part["head_dim"] == 128 and part["hidden_size"] == 4096
    with pytest.raises(ConfigError, match="search of layouts expects"):
        tensor_degrees(shape_of("t5-large", Train.FULL, Loss.STOCK), 8)


def test_what_launches_a_layout() -> None:
    full = configurations(layout(data=2, tensor=4, pipeline=2, zero=1), JOB)
    assert set(full) == {"torchtitan", "megatron"}
    assert "tensor_parallel_degree = 4" in full["torchtitan"]
    assert "local_batch_size = 32" in full["torchtitan"]
    assert "--pipeline-model-parallel-size 2" in full["megatron"]
    stages = json.loads(configurations(layout(data=8, pipeline=2), JOB)["deepspeed"])
    assert stages["gradient_accumulation_steps"] == 8
    sharded = configurations(layout(data=16, zero=3), JOB)
    assert set(sharded) == {"torchtitan", "megatron", "deepspeed", "fsdp2"}
    compile(sharded["fsdp2"], "fsdp2.py", "exec")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(SMALL))
    words = ["search", str(config), "--gpus", "2", "--tokens", "256", "--batch", "1"]
    assert main([*words, "--save", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "tokens/s" in shown and "-- torchtitan --" in shown
    assert (tmp_path / "out" / "torchtitan.toml").exists()
    assert main([*words[:3], "7", *words[4:]]) == 2
    assert "no layout divides" in capsys.readouterr().err


def test_json_and_text() -> None:
    price = pricer().price
    priced = [price(layout(data=16, zero=3)), price(layout(data=16))]
    found = Ranked(job=JOB, priced=tuple(priced), capacity_bytes=80e9)
    told = to_json(found)
    [row] = told["layouts"]  # type: ignore[misc]
    assert row["tokens_per_s"] == 64 * 8192 / row["step_ms"] * 1e3
    asked = Asked(model="m", gpus=16)
    assert any("2 layouts, 1 of them fit" in line for line in lines(asked, found))
    none = Ranked(job=JOB, priced=tuple(priced[1:]), capacity_bytes=80e9)
    assert lines(asked, none)[-1].startswith("None fits")
