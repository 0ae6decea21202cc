"""Times of an observed step in those of a CUDA graph's replay."""

from dataclasses import replace

import pytest

from ssdtrain.plan.calibrate import (
    Corrections,
    PlainTimes,
    RegionTime,
    corrected,
    rebuild_key,
)
from ssdtrain.plan.profile import HostCost, HostCosts, Item, Phase, RegionRun
from ssdtrain.plan.replays import UNHELD, captured
from tests.ssdtrain.plan.test_calibrate import NUM_LAYERS, layers, profile


def test_a_captured_step_has_no_host() -> None:
    """20 ms bound by the host; 0.5 + 4 * 2 ms by itself. A move that the eager step
    hides would take the graph longer."""
    cost = HostCost(pack_ms=1.0, use_ms=1.0)
    item = Item(
        name="a",
        num_bytes=8,
        recipe="r",
        recipe_ms=2.0,
        recipe_host_ms=2.0,
        region=0,
    )
    eager = replace(
        profile(),
        kinds={"model/0": (item, replace(item, name="b", region=1))},
        regions={"model/0": (RegionRun(ms=1.0, host_ms=3.0),) * 2},
        marks=tuple(replace(mark, host_ms=mark.ms) for mark in profile().marks),
        head_host_ms=1.0,
        host_costs=HostCosts(keep=cost, host=cost),
        host_lead_ms=0.5,
    )
    times = {"model/0": (RegionTime(forward_ms=2.0, backward_ms=2.0),) * 2}
    found = captured(eager, Corrections(held_regions=times))
    assert [mark.ms for mark in found.marks] == [2.0, 2.0, 2.0, 2.0]
    assert found.compute_ms == 8.5 and found.tail_ms == 0.0
    assert found.host_ms == 0.0 and found.host_costs == HostCosts()
    own = found.kinds["model/0"][0]
    assert own.recipe == "r" and own.recipe_host_ms == 0.0
    assert own.recipe_ms == pytest.approx(2.0 * 8.5 / 19.0)
    assert all(run.ms > 1e6 for run in found.regions["model/0"])
    # What it takes without its launches, where that was measured and is less.
    for ms, expected in ((0.125, 0.125), (3.0, 2.0)):
        rebuild_ms = {rebuild_key("r", 8): ms}
        held = Corrections(held_regions=times, rebuild_ms=rebuild_ms)
        assert captured(eager, held).kinds["model/0"][0].recipe_ms == expected
        assert corrected(eager, held).kinds["model/0"][0].recipe_ms == 2.0
    # Its edges cost what events would, and copies what eager launches hide, at least.
    assert (found.links.event_ms, found.links.copy_slowdown) == (0.0016, 0.01)
    assert found.links.batch_share > eager.links.batch_share
    dear = replace(eager.links, event_ms=0.5, copy_slowdown=0.25)
    links = captured(replace(eager, links=dear), Corrections()).links
    # An eager event is no edge.
    assert (links.event_ms, links.copy_slowdown) == (0.0016, 0.25)
    # Without such a step, the eager times are the best that is known.
    plain = captured(eager, Corrections())
    assert [mark.ms for mark in plain.marks] == [4.0, 4.0, 5.0, 5.0]
    compared = captured(replace(eager, notes={"recompute": "full"}), Corrections())
    assert compared.kinds["model/0"][0].recipe is None
    assert corrected(eager, Corrections(held_regions=times)).marks[0].ms == 4.0


def test_where_none_was_held_a_phase_takes_no_longer_than_it_was_observed() -> None:
    """The plain step's device waited for launches; what was held is known anyway."""
    eager = replace(profile(), regions={"model/0": (RegionRun(ms=1.0),) * 2})
    items = [replace(item, region=at) for at, item in enumerate(eager.kinds["model/0"])]
    eager = replace(eager, kinds={"model/0": tuple(items)})
    plain = PlainTimes(step_ms=33.0, forward_ms=13.5)
    found = captured(eager, Corrections(plain=tuple(plain)))
    assert found.marks == eager.marks and found.head_ms == eager.head_ms
    assert found.notes[UNHELD] == "as observed"
    times = {"model/0": (RegionTime(forward_ms=2.0, backward_ms=0.0),) * 2}
    found = captured(eager, Corrections(plain=tuple(plain), held_regions=times))
    assert [mark.ms for mark in found.marks] == pytest.approx([2.0, 2.0, 5.0, 5.0])


def test_a_captured_step_has_the_times_of_held_regions() -> None:
    """Without a plain step that fits, the launches' times are taken off by regions, of
    which the first one's backward was not seen. What lies outside shrinks as they
    usually do."""
    eager = layers(2.0)
    ends = tuple(
        replace(eager.marks[at], item=len(eager.kinds["model/0"])) for at in (-1, 0)
    )
    own = (*eager.kinds["model/0"], Item(name="loss", num_bytes=8))
    marks = (ends[1], *eager.marks, replace(ends[0], ms=5.0))
    eager = replace(eager, kinds={"model/0": own}, marks=marks)
    between = replace(eager.marks[6], ms=1.0)
    assert own[between.item].serves == 1
    eager = replace(eager, marks=(*eager.marks[:6], between, *eager.marks[7:]))
    times = [RegionTime(forward_ms=4.5, backward_ms=4.0)] * NUM_LAYERS
    times[0] = RegionTime(forward_ms=9.0, backward_ms=0.0)
    by = Corrections(held_regions={"model/0": tuple(times)})
    found = captured(eager, by)
    forward = [mark.ms for mark in found.marks if mark.phase is Phase.FORWARD]
    backward = [mark.ms for mark in found.marks if mark.phase is Phase.BACKWARD]
    # It is never longer than the eager one.
    assert forward[:12] == [0.0, 0.0, 2.0, 2.0, 2.0, 2.0, 0.5, 1.0, 1.0, 1.0, 1.0, 0.0]
    assert backward == [*[1.0] * 4 * NUM_LAYERS, 1.25]
    assert corrected(eager, by).marks == eager.marks
    # Another number of them was that of another forward.
    by = Corrections(held_regions={"model/0": tuple(times[1:])})
    assert [mark.ms for mark in captured(eager, by).marks] == [
        mark.ms for mark in eager.marks
    ]
