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
from ssdtrain.tools.foresight.collectives import Collective
from ssdtrain.tools.foresight.pipeline import ChunkTimes, pipeline_tasks
from ssdtrain.tools.foresight.simulate import simulate
from ssdtrain.tools.foresight.spec import H100
from ssdtrain.tools.report.build_public import Loss, Shape, Train, shape_of
from ssdtrain.tools.search.experts import Experts, dense_of, experts_of
from ssdtrain.tools.search.launch import configurations
from ssdtrain.tools.search.layout_search import Asked, Ranked, search
from ssdtrain.tools.search.parallel_layout import Job, ParallelLayout, layouts
from ssdtrain.tools.search.pricing import PricedLayout, Pricer
from ssdtrain.tools.search.search_command import lines, to_json
from ssdtrain.tools.search.stage_costs import (
    PerLayer,
    StageCosts,
    Way,
    part_of,
    tensor_degrees,
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


def costs(degree: int, divided: bool) -> StageCosts:
    held = 1e9 / degree * (0.5 if divided else 1.0)
    ends = PerLayer(layer=held, ends=4e9)
    return StageCosts(
        ways={
            "plain": Way(
                milliseconds=PerLayer(layer=30.0 / degree, ends=50.0 / degree),
                activation_bytes=ends,
            ),
            "checkpointing": Way(
                milliseconds=PerLayer(layer=40.0 / degree, ends=50.0 / degree),
                activation_bytes=PerLayer(layer=6.7e7, ends=5e9),
            ),
            "ssdtrain 1": Way(
                milliseconds=PerLayer(layer=31.0 / degree, ends=50.0 / degree),
                activation_bytes=PerLayer(layer=held / 4, ends=4e9),
                moved_bytes=PerLayer(layer=held * 3 / 4, ends=0.0),
            ),
        },
        parameters=PerLayer(layer=2e8 / degree, ends=1e9 / degree),
    )


def pricer(job: Job = JOB, stores: Stores | None = None) -> Pricer:
    return Pricer(
        job=job,
        spec=H100,
        cluster=cluster_of("nvlink:8,ib:400G", H100),
        capacity_bytes=80e9,
        stores=stores or Stores(host_bytes=1e12),
        costs={
            (degree, 1, divided): costs(degree, divided)
            for degree in (1, 2, 4, 8)
            for divided in (False, True)
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


def test_memory_is_divided() -> None:
    """Weights 2, gradients 4 and optimizer 12 bytes, each from its level on."""
    found = [priced(data=16, zero=zero) for zero in range(4)]
    held = [one.memory_bytes for one in found]
    parameters = 32 * 2e8 + 1e9
    saved = [before - after for before, after in pairwise(held)]
    gathered = 2 * 2e8 * 2
    expected = [parameters * size * 15 / 16 for size in (12, 4, 2)]
    expected[2] -= gathered
    assert saved == pytest.approx(expected)
    assert [found[zero].fits for zero in (0, 3)] == [False, True]


def test_a_pipeline_holds_micro_batches_and_waits() -> None:
    one = priced(data=4, pipeline=4, zero=1)
    assert one.parts_ms["compute"] == pytest.approx(16 * (8 * 30 + 50))
    assert one.parts_ms["pipeline bubble"] >= 3 * (8 * 30 + 50)
    states = (8 * 2e8 + 1e9) * (2 + 4 + 12 / 4)
    assert one.memory_bytes == pytest.approx(states + 4 * 8 * 1e9 + 4e9)


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
    step = simulate(ranks).step_us / 1e3
    names = "compute", "pipeline bubble", "pipeline sends"
    predicted = sum(found.parts_ms[name] for name in names)
    assert predicted == pytest.approx(step, rel=0.001)
    held, most = 0, 0
    for task in ranks[0]:
        held += 1 if task.name == "forward" else -1
        most = max(most, held)
    assert one.flying(JOB.batch) == most / chunks


def test_chunks_shorten_the_bubble_and_hold_more() -> None:
    found = [priced(data=4, pipeline=4, chunks=chunks) for chunks in (1, 2, 4)]
    for before, after in pairwise(found):
        assert after.parts_ms["pipeline bubble"] < before.parts_ms["pipeline bubble"]
    for after in found[1:]:
        assert after.memory_bytes > found[0].memory_bytes


def test_context_parallelism_divides_activations_and_no_states() -> None:
    found = [
        priced(data=16 // context, context=context, zero=1) for context in (1, 2, 4)
    ]
    for before, after in pairwise(found):
        parts = before.memory_parts, after.memory_parts
        assert parts[1]["activations"] == pytest.approx(parts[0]["activations"] / 2)
        for name in ("weights", "gradients", "optimizer"):
            assert parts[1][name] == parts[0][name]  # 16 ranks share them in any case
        moved = "context parallelism"
        assert after.parts_ms[moved] > before.parts_ms[moved]
        assert after.parts_ms["compute"] == pytest.approx(before.parts_ms["compute"])
    assert found[0].parts_ms["context parallelism"] == 0.0


def test_halves_of_two_sequences_are_as_much_as_one() -> None:
    """No kernel gets larger by context parallelism: it is never chosen for that."""
    one = priced(data=8, zero=1)
    halves = priced(data=4, context=2, sequences=2, zero=1)
    assert halves.parts_ms["compute"] == one.parts_ms["compute"]
    assert halves.memory_parts["activations"] == one.memory_parts["activations"]
    assert halves.step_ms > one.step_ms


def test_sequence_parallelism_holds_less_and_moves_as_much() -> None:
    whole, divided = (
        priced(data=4, tensor=4, zero=1, divided=divided) for divided in (False, True)
    )
    assert divided.memory_parts["activations"] < whole.memory_parts["activations"]
    assert divided.parts_ms == whole.parts_ms


def test_expert_parallelism_divides_experts() -> None:
    found = [priced(MIXED, data=16, zero=1, expert=expert) for expert in (1, 2, 4, 8)]
    whole = 32 * 8 * 3 * 4096 * 14336
    for expert, one in zip((1, 2, 4, 8), found, strict=True):
        dense = 32 * 2e8 + 1e9
        weights = 2 * (dense + whole / expert)
        assert one.memory_parts["weights"] == pytest.approx(weights)
        shares = dense / 16 + whole / expert / (16 / expert)
        assert one.memory_parts["optimizer"] == pytest.approx(12 * shares)
    for before, after in pairwise(found):
        assert after.memory_bytes < before.memory_bytes
    sent = [priced(MIXED, data=16, expert=e).parts_ms["experts"] for e in (4, 8, 16)]
    assert sent[2] > sent[1]  # beyond a node
    dense = priced(data=16, zero=1)
    assert dense.parts_ms["experts"] == 0.0
    assert found[0].parts_ms["compute"] == dense.parts_ms["compute"]


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


def test_drives_that_wear_out_or_are_slow_count() -> None:
    one = layout(data=4, pipeline=4, zero=1, way="ssdtrain 1")
    many, few = (stores_of("8GB", f"d7-p5620:{n}", 3.0, 8) for n in (64, 1))
    fast, slow = (pricer(stores=each).price(one) for each in (many, few))
    assert slow.years < fast.years
    assert slow.parts_ms["SSD"] > fast.parts_ms["SSD"] == 0.0
    assert slow.step_ms == pytest.approx(few.write_ms(slow.resting))
    forever = replace(many, least_years=2 * fast.years)
    assert not pricer(stores=forever).price(one).fits
    assert pricer(stores=replace(many, least_years=fast.years / 2)).price(one).fits
    with pytest.raises(ConfigError, match="--ssd expects"):
        stores_of("1TB", "d7-p5620", 3.0, 8)
    with pytest.raises(ConfigError, match="no SSD is called"):
        stores_of("1TB", "floppy:8", 3.0, 8)


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


def test_links_between_nodes_are_slower() -> None:
    cluster = cluster_of("nvlink:8,ib:400G", H100)
    kind, size = Collective.ALL_GATHER, 1e9
    near = cluster.microseconds(kind, size, 8)
    far = cluster.microseconds(kind, size, 16)
    apart = cluster.microseconds(kind, size, 2, stride=8)
    assert near < far < apart
    # What goes to everybody is not on a neighbour already.
    exchange = Collective.ALL_TO_ALL
    within = cluster.microseconds(exchange, size, 8)
    between = cluster.microseconds(exchange, size, 2, stride=8)
    assert cluster.microseconds(exchange, size, 16) == pytest.approx(within + between)
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


def mixture(kind: str) -> Shape:
    values = {**SMALL, "model_type": kind, "num_experts_per_tok": 2}
    if kind == "mixtral":
        more = {"num_local_experts": 8}
    else:
        more = {"num_experts": 8, "moe_intermediate_size": 256}
    return Shape({**values, **more}, Train.FULL, Loss.STOCK)


@pytest.mark.parametrize(("kind", "width"), [("mixtral", 1024), ("qwen3_moe", 256)])
def test_a_mixture_computes_as_a_dense_model(kind: str, width: int) -> None:
    shape = mixture(kind)
    experts = experts_of(shape)
    assert experts == Experts(number=8, each=2, width=width)
    dense = dense_of(shape)
    assert dense.values["intermediate_size"] == 2 * width
    assert experts_of(dense) is None and dense_of(dense) is dense
    assert experts.parameters(512) == 8 * 3 * 512 * width
    assert tensor_degrees(shape, 8) == [1, 2, 4]


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


def test_a_mixture_is_searched(tmp_path: Path) -> None:
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
    told = to_json(found)
    [row] = told["layouts"]  # type: ignore[misc]
    assert row["tokens_per_s"] == 64 * 8192 / row["step_ms"] * 1e3
    assert row["memory_bytes"] == sum(row["memory_parts"].values())
    assert json.dumps(told)
    asked = Asked(model="m", gpus=16)
    assert any("2 layouts, 1 of them fit" in line for line in lines(asked, found))
    none = Ranked(job=JOB, priced=tuple(both[1:]), capacity_bytes=80e9)
    assert lines(asked, none)[-1].startswith("None fits")
