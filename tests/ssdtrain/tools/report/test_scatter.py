"""Step time against peak."""

import itertools
from dataclasses import replace

import pytest

from ssdtrain.plan.profile import Profile
from ssdtrain.plan.timeline import Timeline
from ssdtrain.tools.report.references import references
from ssdtrain.tools.report.scatter import spots
from tests.ssdtrain.plan.profiles import MB, chain, with_links

PRODUCERS = ("input", "ScaledDotProductFlashAttentionBackward0", "MmBackward0", "Gelu")


def blocks(num: int) -> Profile:
    """Blocks of four tensors."""
    profile = chain(4 * num)
    items = tuple(
        replace(item, name=f"{PRODUCERS[n % 4]} [1]", module=f"blocks.{n // 4}")
        for n, item in enumerate(profile.kinds["model/0"])
    )
    return replace(profile, kinds={"model/0": items})


def test_what_checkpointing_would_do() -> None:
    """Blocks of four tensors at 1 MB, forward 4 ms each."""
    found = {r.name: r for r in references(Timeline(blocks(8)))}
    keep_ms = 8 * 12 + 3.0
    full = found["full recompute"]
    assert full.step_ms == pytest.approx(keep_ms + 8 * 4)
    assert full.peak_bytes == (8 + 4) * MB
    half = found["every second layer recomputed"]
    assert half.step_ms == pytest.approx(keep_ms + 4 * 4)
    # Before the last block, which keeps its four: four inputs and three blocks.
    assert half.peak_bytes == (4 + 4 * 4) * MB
    selective = found["selective recompute"]
    # Of each block the attention and one product are stored: their operators rest.
    assert selective.step_ms == pytest.approx(keep_ms + 8 * 2)
    assert selective.peak_bytes == (7 * 3 + 4) * MB


def in_turn(profile: Profile, num_lanes: int) -> Profile:
    """As many micro-batches, each one's backward behind its forward."""
    marks = [
        replace(mark, lane=lane) for lane in range(num_lanes) for mark in profile.marks
    ]
    return replace(profile, lanes=profile.lanes * num_lanes, marks=tuple(marks))


def test_micro_batches_in_turn_need_the_memory_of_one() -> None:
    one, four = blocks(8), in_turn(blocks(8), 4)
    expected = {r.name: r.peak_bytes for r in references(Timeline(one))}
    assert {r.name: r.peak_bytes for r in references(Timeline(four))} == expected
    keep = next(spot for spot in spots(four) if spot.name == "keep everything")
    assert max(expected.values()) < keep.peak_bytes
    # Two forwards, then two backwards, as in a pipeline: both are there at once.
    half = len(one.marks) // 2
    both = in_turn(one, 2).marks
    order = (*both[:half], *both[2 * half : 3 * half], *both[half : 2 * half])
    pipeline = replace(in_turn(one, 2), marks=(*order, *both[3 * half :]))
    found = {r.name: r.peak_bytes for r in references(Timeline(pipeline))}
    assert found["full recompute"] == expected["full recompute"] + 8 * MB


def test_the_frontier_falls() -> None:
    """Beside checkpointing: each plan within the ends, and less memory never faster."""
    points = spots(with_links(blocks(6), 0.4))
    plans = [point for point in points if point.is_ours]
    assert len(plans) >= 3
    for larger, smaller in itertools.pairwise(plans):
        assert smaller.peak_bytes < larger.peak_bytes
        assert smaller.step_ms >= larger.step_ms - 1e-9
    assert {point.name for point in points if not point.is_ours} == {
        "keep everything",
        "full recompute",
        "full recompute, checkpoints offloaded",
        "every second layer recomputed",
        "selective recompute",
    }
