"""Rows of PITFALLS that are about what a plan believes (see also `test_rows.py`).

Remote memory and shared links (WholeGraph, torchtitan) have two halves. Pages lie where
the rank runs, which is the launcher's to choose: `doctor` says so
(tests/ssdtrain/tools/machine/test_gpus.py, mutant `far_node_unsaid`). What neighbours
leave of a link is never assumed: every profile has the rates of its own observed step.
"""

from dataclasses import replace

import pytest

from ssdtrain.errors import ConfigError
from ssdtrain.plan.choose import choose
from ssdtrain.plan.goal import Goal
from ssdtrain.plan.profile import Phase
from tests.ssdtrain.plan import profiles as made

MB = made.MB


def test_a_peak_of_recomputation_is_not_promised_away() -> None:
    """accelerate#4175: the peak lies where a checkpointed region is computed again, so
    moving its inputs frees nothing of it: a budget below it must be refused."""
    profile = made.chain(8, gb_per_s=100.0)
    *others, last = profile.marks
    assert last.phase is Phase.BACKWARD
    region = 20 * MB
    marks = (*others, replace(last, other_bytes=region))
    profile = replace(profile, marks=marks, tail_ms=10.0)
    # A mark behind it: the last one of a step has no operators to measure.
    after = replace(last, other_bytes=0, ms=1.0)
    profile = replace(profile, marks=(*marks, after))
    found = choose(profile, Goal(max_overhead=0.5)).prediction
    assert found.peak_bytes >= region
    with pytest.raises(ConfigError, match="cannot be reached"):
        choose(profile, Goal(memory_budget_bytes=region - MB))


def test_a_count_that_is_missing_is_not_called_zero() -> None:
    """On a CPU: "beside them 0 bytes are in use (weights, optimizer)"."""
    profile = made.chain(8)
    for base_bytes, text in ((0, "optimizer are not counted"), (MB, f"{MB} bytes are")):
        with pytest.raises(ConfigError, match=text):
            choose(replace(profile, base_bytes=base_bytes), Goal(device_bytes=MB + 1))


def test_a_plan_leaves_room_for_what_it_did_not_see() -> None:
    """pytorch#197838, #197871: the solver's plan fits to the byte, and the allocator,
    which rounds, does not agree."""
    profile = made.chain(12, gb_per_s=100.0)
    everything = 12 * MB
    exact = choose(profile, Goal(memory_budget_bytes=everything))
    assert exact.policy != "keep-all"
    assert exact.prediction.peak_bytes <= 0.985 * everything
    roomy = choose(profile, Goal(memory_budget_bytes=int(1.02 * everything)))
    assert roomy.policy == "keep-all"
