"""Layouts: what they cost, which fit, and what launches them."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tomllib

from ssdtrain.errors import ConfigError
from ssdtrain.tools.cli import main
from ssdtrain.tools.foresight.cluster import cluster_of
from ssdtrain.tools.foresight.pipeline import ChunkTimes, pipeline_tasks
from ssdtrain.tools.foresight.simulate import simulate_ranks
from ssdtrain.tools.foresight.spec import H100
from ssdtrain.tools.report.build_public import Loss, Shape, Train
from ssdtrain.tools.search import stage_costs
from ssdtrain.tools.search.experts import Experts
from ssdtrain.tools.search.frameworks import StepMoment
from ssdtrain.tools.search.launch import configurations
from ssdtrain.tools.search.layout_search import Asked, Ranked, search
from ssdtrain.tools.search.parallel_layout import (
    Division,
    Job,
    ParallelLayout,
    layouts,
)
from ssdtrain.tools.search.pricing import PricedLayout, Pricer
from ssdtrain.tools.search.search_command import layouts_to_json, lines
from ssdtrain.tools.search.stage_costs import (
    ActivationCost,
    PerLayer,
    StageCosts,
)
from ssdtrain.tools.search.stores import Stores, stores_of

JOB = Job(layers=32, hidden=4096, tokens=8192, batch=64, gpus=16, keys=2048)
MIXED = replace(JOB, experts=Experts(number=8, each=2, width=14336))
SMALL = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
}


def costs(degree: int, division: Division) -> StageCosts:
    held = 1e9 / degree * (1.0 if division is Division.NONE else 0.5)
    ends = PerLayer(layer=held, ends=4e9)
    return StageCosts(
        ways={
            "plain": ActivationCost(
                milliseconds=PerLayer(layer=30.0 / degree, ends=50.0 / degree),
                activation_bytes=dict.fromkeys(StepMoment, ends),
            ),
            "checkpointing": ActivationCost(
                milliseconds=PerLayer(layer=40.0 / degree, ends=50.0 / degree),
                activation_bytes=dict.fromkeys(
                    StepMoment, PerLayer(layer=6.7e7, ends=5e9)
                ),
            ),
            "ssdtrain 1": ActivationCost(
                milliseconds=PerLayer(layer=31.0 / degree, ends=50.0 / degree),
                activation_bytes=dict.fromkeys(
                    StepMoment, PerLayer(layer=held / 4, ends=4e9)
                ),
                moved_bytes=PerLayer(layer=held * 3 / 4, ends=0.0),
            ),
        },
        parameters=PerLayer(layer=2e8 / degree, ends=1e9 / degree),
        head=0.0,
    )


def pricer(job: Job = JOB, stores: Stores | None = None) -> Pricer:
    return Pricer(
        job=job,
        spec=H100,
        cluster=cluster_of("nvlink:8,ib:400G", H100),
        capacity_bytes=80e9,
        stores=stores or Stores(host_bytes=1e12),
        costs={
            (degree, 1, division): costs(degree, division)
            for degree in (1, 2, 4, 8)
            for division in Division
        },
    )


def layout(**more: Any) -> ParallelLayout:
    plain = {"data": 1, "tensor": 1, "pipeline": 1, "zero": 0, "sequences": 1}
    return ParallelLayout(**{**plain, "way": "plain", **more})


def priced(job: Job = JOB, **more: Any) -> PricedLayout:
    return pricer(job).price(layout(**more))


@pytest.mark.parametrize("job", [JOB, MIXED], ids=["dense", "experts"])
def test_all_layouts_use_all_gpus(job: Job) -> None:
    found = list(layouts(job, [1, 2, 4, 8], [1, 2], ["plain"]))
    assert len(found) == len(set(found)) > 100
    for one in found:
        assert one.data * one.tensor * one.context * one.pipeline == 16
        assert one.micro_batches(64) * one.data * one.sequences == 64
        assert one.replicas % one.expert == 0
        assert one.tensor > 1 or not one.divided
        assert job.layers % (one.pipeline * one.chunks) == 0
    assert {one.context for one in found} == {1, 2, 4}
    assert {one.chunks for one in found} >= {1, 2, 4}
    degrees = {one.expert for one in found}
    assert degrees == ({1} if job is JOB else {1, 2, 4, 8})


def test_a_stage_of_few_layers_moves_no_less_than_nothing() -> None:
    """Lines drawn through seven layers and more, at one: plain training instead."""
    full = costs(1, Division.NONE)
    moves = PerLayer(layer=1e9, ends=-2e9)
    way = replace(full.ways["ssdtrain 1"], moved_bytes=moves)
    faster = replace(way, milliseconds=PerLayer(layer=40.0, ends=-40.0))
    both = replace(full, ways={**full.ways, "a": way, "b": faster})
    for name, most in (("a", 1), ("b", 8)):
        assert both.way_of(name, most) == "plain"
        assert both.way_of(name, most + 1) == name
    mine = replace(pricer(), costs={(1, 1, Division.NONE): both})
    found = mine.price(layout(data=2, pipeline=8, way="b"))
    assert found.layout.way == "plain", "the row has the name of what it is priced as"


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"model_type": "mamba", "num_attention_heads": None}, "mamba"),
        ({"model_type": "vit", "vocab_size": None}, "vit"),
    ],
)
def test_what_is_no_decoder(changes: dict[str, Any], kind: str, tmp_path: Path) -> None:
    values = {k: v for k, v in (SMALL | changes).items() if v is not None}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=f"expects one of .*, got {kind}"):
        search(Asked(model=str(tmp_path), gpus=8, tokens=64), print)


@pytest.mark.parametrize(("stages", "chunks"), [(2, 1), (4, 1), (2, 2), (4, 2), (4, 4)])
def test_a_pipeline_takes_what_its_schedule_takes(stages: int, chunks: int) -> None:
    """The bubble and the micro-batches in flight are those of foresight's simulation,
    task by task."""
    one = layout(data=16 // stages, pipeline=stages, chunks=chunks, zero=1)
    found = pricer().price(one)
    count = one.micro_batches(JOB.batch)
    stage = found.parts_ms["compute"] / count * 1e3
    passed = 8192 * 4096 * 2
    send = cluster_of("nvlink:8,ib:400G", H100).send_us(passed, 16 // stages)
    each = ChunkTimes(forward_us=stage / 3 / chunks, backward_us=stage * 2 / 3 / chunks)
    ranks = pipeline_tasks([[each] * chunks] * stages, count, send)
    step = simulate_ranks(ranks).step_us / 1e3
    names = "compute", "pipeline bubble", "pipeline sends"
    predicted = sum(found.parts_ms[name] for name in names)
    assert predicted == pytest.approx(step, rel=0.001)
    held, most = 0, 0
    for task in ranks[0]:
        held += 1 if task.name == "forward" else -1
        most = max(most, held)
    assert one.flying(JOB.batch) == most / chunks


def test_moved_activations_fill_host_memory_and_then_the_ssd() -> None:
    one = layout(data=4, pipeline=4, zero=1, way="ssdtrain 1")
    held = 4 * 8 * 0.75e9
    in_host = pricer().price(one)
    assert in_host.resting.host_bytes == pytest.approx(held)
    assert in_host.resting.written_bytes == 0.0 and in_host.years == float("inf")
    drives = stores_of("80GB", "d7-p5620:8", 3.0, 8)
    both = pricer(stores=drives).price(one)
    assert both.resting.host_bytes == pytest.approx(10e9)
    assert both.resting.ssd_bytes == pytest.approx(held - 10e9)
    share = (held - 10e9) / held
    assert both.resting.written_bytes == pytest.approx(16 * 8 * 0.75e9 * share)
    assert both.memory_bytes == in_host.memory_bytes
    assert 0.0 < both.years < float("inf")
    # Nobody has so much host memory, and no drive: it does not fit.
    assert not pricer(stores=stores_of("80GB", None, 3.0, 8)).price(one).fits
    plain = pricer(stores=drives).price(replace(one, way="plain"))
    assert plain.memory_bytes > both.memory_bytes
    assert plain.resting.host_bytes == plain.resting.ssd_bytes == 0.0


def test_more_of_everything_that_is_divided_never_holds_more() -> None:
    """Whatever is doubled, no part of memory grows that it divides."""
    found = {
        one: pricer(MIXED).price(one)
        for one in layouts(MIXED, [1, 2, 4, 8], [1], ["plain", "ssdtrain 1"])
        if one.zero == 1
    }
    compared = 0
    for one, own in found.items():
        assert own.memory_bytes == sum(own.memory_parts.values())
        assert all(part >= 0.0 for part in own.memory_parts.values())
        assert all(part >= 0.0 for part in own.parts_ms.values())
        for other in (
            replace(one, expert=2 * one.expert),
            replace(one, data=one.data // 2, context=2 * one.context),
        ):
            if other in found:
                compared += 1
                assert found[other].memory_bytes <= own.memory_bytes * (1 + 1e-9)
    assert compared > 100


def mixture(kind: str) -> Shape:
    values = {**SMALL, "model_type": kind, "num_experts_per_tok": 2}
    if kind == "mixtral":
        more = {"num_local_experts": 8}
    else:
        more = {"num_experts": 8, "moe_intermediate_size": 256}
    return Shape({**values, **more}, Train.FULL, Loss.STOCK)


def test_what_launches_a_layout() -> None:
    full = configurations(
        layout(data=2, tensor=4, pipeline=2, zero=1, divided=True), JOB
    )
    assert set(full) == {"torchtitan", "megatron", "ssdtrain train"}
    assert "tensor_parallel_degree = 4" in full["torchtitan"]
    assert "local_batch_size = 32" in full["torchtitan"]
    assert "--pipeline-model-parallel-size 2" in full["megatron"]
    assert "--sequence-parallel" in full["megatron"]
    whole = configurations(layout(data=4, tensor=4), JOB)
    own = {"megatron", "ssdtrain train"}
    assert set(whole) == own  # nobody else has it without sequence parallelism
    assert "--sequence-parallel" not in whole["megatron"]
    stages = json.loads(configurations(layout(data=8, pipeline=2), JOB)["deepspeed"])
    assert stages["gradient_accumulation_steps"] == 8
    sharded = configurations(layout(data=16, zero=3), JOB)
    own |= {"torchtitan", "deepspeed", "fsdp2"}
    assert set(sharded) == own
    compile(sharded["fsdp2"], "fsdp2.py", "exec")


def test_what_launches_context_experts_and_chunks() -> None:
    one = layout(data=4, context=2, pipeline=2, chunks=4, expert=4, zero=1)
    found = configurations(one, MIXED)
    assert set(found) == {"torchtitan", "megatron"}
    flags = found["megatron"].replace("\\\n", " ").split()
    given = {flag: flags[at + 1] for at, flag in enumerate(flags[:-1])}
    assert given["--context-parallel-size"] == "2"
    assert given["--cp-comm-type"] == "all_gather"
    assert given["--num-virtual-stages-per-pipeline-rank"] == "4"
    assert given["--expert-model-parallel-size"] == "4"
    assert given["--expert-tensor-parallel-size"] == "1"
    assert given["--num-experts"] == "8" and given["--moe-router-topk"] == "2"
    values = tomllib.loads(found["torchtitan"])["parallelism"]
    assert values["context_parallel_degree"] == 2
    assert values["expert_parallel_degree"] == 4
    assert values["pipeline_parallel_schedule"] == "Interleaved1F1B"
    assert values["pipeline_parallel_layers_per_stage"] == 4
    dense = configurations(layout(data=16), JOB)["megatron"]
    for word in ("context", "virtual", "expert"):
        assert word not in dense


def test_what_launches_moved_activations() -> None:
    one = layout(data=16, zero=3, way="ssdtrain 1")
    found = configurations(one, JOB, drives=True)
    assert "ssdtrain.offload(" in found["ssdtrain"]
    assert 'target="tiered"' in found["ssdtrain"]
    assert 'target="host"' in configurations(one, JOB)["ssdtrain"]
    assert "recompute" not in found["megatron"]
    assert 'mode = "none"' in found["torchtitan"]
    assert "CHECKPOINTING = False" in found["fsdp2"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(SMALL))
    words = ["search", str(config), "--gpus", "2", "--tokens", "256", "--batch", "1"]
    assert main([*words, "--save", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "tokens/s" in shown and "-- torchtitan --" in shown
    assert (tmp_path / "out" / "torchtitan.toml").exists()
    assert (tmp_path / "out" / "front.png").read_bytes().startswith(b"\x89PNG")
    assert main([*words[:3], "7", *words[4:]]) == 2
    assert "no layout divides" in capsys.readouterr().err


def test_a_mixture_is_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Lines through the usual depths: test_published.py.
    monkeypatch.setattr(stage_costs, "REPEATS", (1, 2))
    config = tmp_path / "config.json"
    config.write_text(json.dumps(dict(mixture("mixtral").values)))
    asked = Asked(model=str(config), gpus=4, tokens=256, batch=4)
    found = search(asked, lambda text: None)
    degrees = {one.layout.expert for one in found.priced}
    assert degrees == {1, 2, 4}
    own = [one for one in found.priced if one.layout.tensor == 1]
    whole = 8 * 8 * 3 * 512 * 1024
    for one in own:
        if one.layout.zero == 0 and one.layout.pipeline == 1:
            dense = one.memory_parts["weights"] / 2 - whole / one.layout.expert
            assert 0 < dense < whole / 8  # attention, embedding and head
    flags = configurations(found.best.layout, found.job)["megatron"]
    assert "--num-experts 8" in flags


def test_the_front() -> None:
    """No layout of it is beaten in both, and every other one is."""
    made = [priced(data=16 // t, tensor=t, zero=z) for t in (1, 2, 8) for z in (0, 3)]
    found = Ranked(job=JOB, priced=tuple(made), capacity_bytes=80e9)
    front = found.front
    for one, other in pairwise(front):
        assert one.memory_bytes < other.memory_bytes and one.step_ms > other.step_ms
    for own in made:
        assert any(
            each.memory_bytes <= own.memory_bytes and each.step_ms <= own.step_ms
            for each in front
        )


def test_json_and_text() -> None:
    both = [priced(data=16, zero=3), priced(data=16)]
    found = Ranked(job=JOB, priced=tuple(both), capacity_bytes=80e9)
    told = layouts_to_json(found)
    [row] = told["layouts"]  # type: ignore[misc]
    assert row["tokens_per_s"] == 64 * 8192 / row["step_ms"] * 1e3
    assert row["memory_bytes"] == sum(row["memory_parts"].values())
    assert json.dumps(told)
    asked = Asked(model="m", gpus=16)
    assert any("2 layouts, 1 of them fit" in line for line in lines(asked, found))
    none = Ranked(job=JOB, priced=tuple(both[1:]), capacity_bytes=80e9)
    assert lines(asked, none)[-1].startswith("None fits")
