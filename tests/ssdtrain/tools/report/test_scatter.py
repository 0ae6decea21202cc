"""Step time against peak."""

import itertools
from dataclasses import replace

import pytest

from ssdtrain.plan.profile import AttentionPart, Profile, RegionRun
from ssdtrain.plan.timeline import Timeline
from ssdtrain.tools.report.scatter import reruns, spots
from tests.ssdtrain.plan.profiles import MB, chain, with_links

KIND = "model/0"


def blocks(num: int) -> Profile:
    """Blocks of four tensors, of which the second is what attention gives."""
    profile = chain(4 * num)
    items = tuple(
        replace(item, module=f"blocks.{n // 4}", region=n // 4)
        if n % 4
        else replace(item, serves=n // 4)
        for n, item in enumerate(profile.kinds[KIND])
    )
    runs = tuple(
        RegionRun(
            module=f"blocks.{n}",
            inputs=(4 * n,),
            ms=4.0,
            parts=(AttentionPart(items=(4 * n + 1,), ms=1.0),),
        )
        for n in range(num)
    )
    return replace(profile, kinds={KIND: items}, regions={KIND: runs})


def test_what_checkpointing_would_do() -> None:
    """Blocks of four tensors at 1 MB, forward 4 ms each."""
    found = dict(reruns(Timeline(blocks(8))))
    keep_ms = 8 * 12 + 3.0
    full = found["full recompute"]
    assert full.step_ms == pytest.approx(keep_ms + 8 * 4)
    assert full.peak_bytes == (8 + 3) * MB
    half = found["every second layer recomputed"]
    assert half.step_ms == pytest.approx(keep_ms + 4 * 4)
    # Before the last block: four inputs, and three tensors of each other block.
    assert half.peak_bytes == (4 + 4 * 3) * MB
    stored = found["full recompute, attention stored"]
    assert stored.step_ms == pytest.approx(keep_ms + 8 * 3)
    moved = found["full recompute, checkpoints offloaded"]
    assert moved.peak_bytes < full.peak_bytes


def in_turn(profile: Profile, num_lanes: int) -> Profile:
    """As many micro-batches, each one's backward behind its forward."""
    marks = [
        replace(mark, lane=lane) for lane in range(num_lanes) for mark in profile.marks
    ]
    return replace(profile, lanes=profile.lanes * num_lanes, marks=tuple(marks))


def peaks_of(profile: Profile) -> dict[str, int]:
    """By name."""
    return {name: each.peak_bytes for name, each in reruns(Timeline(profile))}


def test_micro_batches_in_turn_need_the_memory_of_one() -> None:
    one, four = blocks(8), in_turn(blocks(8), 4)
    expected = peaks_of(one)
    assert peaks_of(four) == expected
    keep = next(spot for spot in spots(four) if spot.name == "keep everything")
    assert max(expected.values()) < keep.peak_bytes
    # Two forwards, then two backwards, as in a pipeline: both are there at once.
    half = len(one.marks) // 2
    both = in_turn(one, 2).marks
    order = (*both[:half], *both[2 * half : 3 * half], *both[half : 2 * half])
    pipeline = replace(in_turn(one, 2), marks=(*order, *both[3 * half :]))
    found = peaks_of(pipeline)
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
        "full recompute, attention stored",
    }
