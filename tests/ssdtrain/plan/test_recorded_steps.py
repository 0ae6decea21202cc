"""Simulated steps, recorded: whoever changes the queues changes no prediction.

    python -m tests.ssdtrain.plan.test_recorded_steps    writes them anew

Recorded with the planner's and the foresight's simulators while they had queues of
their own: four profiles of an H200 under all fixed policies, on links as recorded, to
an SSD through little pinned memory, to an SSD directly and with a busy host; random
tasks of several ranks with groups, signals and hosts that wait.
"""

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ssdtrain.curves import Curve
from ssdtrain.plan.baselines import fixed_policies
from ssdtrain.plan.profile import PROFILE_FILE, HostCost, HostCosts, Profile
from ssdtrain.plan.schedule import schedule
from ssdtrain.plan.simulate import simulate
from ssdtrain.plan.timeline import Timeline
from ssdtrain.tools.foresight.graph import Stream
from ssdtrain.tools.foresight.simulate import Task
from ssdtrain.tools.foresight.simulate import simulate_ranks as simulate_ranks

RECORDED = Path(__file__).parent / "recorded"
STEPS = RECORDED / "steps.json"
NAMES = ("h200_12288x3", "h200_16384x2", "h200_8192x4", "h200_qwen3_4b_12_layers")
NUM_RANDOM = 12
RELATIVE = 1e-9


def machines(profile: Profile) -> Iterator[tuple[str, Profile]]:
    """The same step where bytes go elsewhere, or the host has more to do."""
    yield "as recorded", profile
    write, read = Curve.straight(1e-4, 12e9), Curve.straight(1e-4, 13e9)
    links = replace(
        profile.links, ssd_write=write, ssd_read=read, ssd_duplex_slowdown=0.7
    )
    saved = max(item.num_bytes for item in profile.items_of(0))
    notes = {**profile.notes, "target": "ssd"}
    yield "ssd", replace(profile, links=links, host_bytes=4 * saved, notes=notes)
    direct = replace(links, ssd_direct=True)
    yield "ssd, direct", replace(profile, links=direct, notes=notes)
    cost = HostCost(pack_ms=0.03, use_ms=0.05, load_ms=0.02)
    costs = HostCosts(keep=cost, host=cost, ssd=cost, rebuild=cost)
    marks = tuple(replace(m, host_ms=0.9 * m.ms, num_handles=2) for m in profile.marks)
    yield (
        "busy host",
        replace(profile, marks=marks, host_costs=costs, host_lead_ms=1.0),
    )


def planned() -> Iterator[tuple[str, dict[str, Any]]]:
    """Predictions of every policy."""
    for name in NAMES:
        recorded = PROFILE_FILE.read(RECORDED / f"{name}.json")
        for machine, profile in machines(recorded):
            line = Timeline(profile)
            for policy in fixed_policies(line):
                orders = schedule(line, policy.placements, policy.style)
                found = simulate(line, orders)
                values = {
                    "step_ms": found.step_ms,
                    "peak_bytes": found.peak_bytes,
                    "stall_ms": found.stall_ms,
                    "recompute_ms": found.recompute_ms,
                    "host_wait_ms": found.host_wait_ms,
                    "host_peak_bytes": found.host_peak_bytes,
                    "keep_ms": found.keep_ms,
                }
                values |= {k: link.busy_ms for k, link in found.links.items()}
                yield f"{name}, {machine}, {policy.name}", values


def drawn(seed: int) -> list[list[Task]]:
    """Ranks of random tasks that meet at every fifth."""
    draw = random.Random(seed)
    ranks = []
    for rank in range(draw.randint(1, 4)):
        own = random.Random(1000 * seed + rank)
        tasks: list[Task] = []
        for number in range(60):
            meets = number % 5 == 4
            streams = [
                s for s in Stream if s not in (Stream.COMMUNICATION, Stream.SIDE)
            ]
            after = tuple(own.sample(range(number), min(number, own.randint(0, 2))))
            tasks.append(
                Task(
                    name=f"t{number}",
                    host_us=own.uniform(0.0, 8.0),
                    host_after_us=own.uniform(0.0, 3.0),
                    device_us=0.0 if own.random() < 0.1 else own.uniform(0.0, 20.0),
                    stream=Stream.COMMUNICATION if meets else own.choice(streams),
                    after=after,
                    group=number if meets else None,
                    signal=("s", rank, number) if own.random() < 0.3 else None,
                    signal_us=own.uniform(0.0, 5.0),
                    host_waits=own.random() < 0.1,
                )
            )
        ranks.append(tasks)
    for first, second in itertools.pairwise(ranks):
        given = [t.signal for t in first[:20] if t.signal is not None]
        second[30] = replace(second[30], waits_for=tuple(given[:2]))
    return ranks


def of_ranks() -> Iterator[tuple[str, dict[str, Any]]]:
    """Random tasks."""
    for seed in range(NUM_RANDOM):
        found = simulate_ranks(drawn(seed))
        for number, rank in enumerate(found.ranks):
            yield (
                f"tasks {seed}, rank {number}",
                {
                    "step_us": rank.step_us,
                    "host_us": rank.host_us,
                    "waited_us": rank.waited_us,
                    "busy_us": sum(rank.busy_us.values()),
                    "ends_us": sum(rank.ends_us),
                },
            )


@pytest.mark.parametrize("found", [planned, of_ranks], ids=["plans", "ranks"])
def test_steps_are_as_recorded(found: Any) -> None:
    """All numbers of all steps, to 1e-9."""
    recorded = json.loads(STEPS.read_text())
    number = 0
    for name, values in found():
        assert values == pytest.approx(recorded[name], rel=RELATIVE, abs=1e-9), name
        number += 1
    assert number > NUM_RANDOM


if __name__ == "__main__":
    STEPS.write_text(json.dumps({**dict(planned()), **dict(of_ranks())}, indent=0))
