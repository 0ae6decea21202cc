"""Times of an observed step in those of a CUDA graph's replay."""

from dataclasses import replace

from ssdtrain.plan.calibrate import (
    Corrections,
    RegionTime,
    corrected,
)
from ssdtrain.plan.profile import Item, Phase
from ssdtrain.plan.replays import captured
from tests.ssdtrain.plan.test_calibrate import NUM_LAYERS, layers


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
