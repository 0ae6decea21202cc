"""TRL's trainers with SSDTRAIN set: the same losses and weights, fewer bytes kept."""

from pathlib import Path
from typing import Any

import pytest

from tests.ssdtrain.integrations.scripts import ALL, assert_equal_bits, run, start
from tests.ssdtrain.integrations.trl_scripts import alternating, script, scripts

pytest.importorskip("trl")
pytestmark = pytest.mark.slow
WHICH = ("sft", "sft lora", "dpo", "dpo lora", "grpo", "grpo lora", "rloo", "reward")
Found = tuple[dict[str, Any], dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """All of them plain, and all with SSDTRAIN."""
    directory = tmp_path_factory.mktemp("trl")
    text = scripts(WHICH)
    return run(text, directory), run(text, directory, ALL)


@pytest.mark.parametrize("which", WHICH)
def test_equal_bits(which: str, found: Found) -> None:
    plain, ours = found
    assert_equal_bits(ours[which], plain[which])


def test_padded_batches_alternate_with_unpadded(tmp_path: Path) -> None:
    """At one shape a mask is saved or not. Bytes move in each step, and the plan of
    padded batches is found again. A batch that the plan was not made for may go above
    the budget."""
    text, budget = alternating(), 400_000
    plain = run(text, tmp_path)
    assert len({tuple(shape) for shape, _ in plain["masked"]}) == 1
    assert {is_masked for _, is_masked in plain["masked"]} == {True, False}
    for setting in (ALL, f"memory_budget_bytes={budget},min_bytes=0"):
        ours = run(text, tmp_path, setting)
        assert ours["losses"] == plain["losses"] and len(set(ours["losses"])) > 1
        assert ours["weights"] == plain["weights"]
        assert len(ours["reports"]) == 24
        for moved, rebuilt, saved in ours["reports"]:
            assert moved + rebuilt > 0.5 * saved
    padded = [all(m for _, m in ours["masked"][2 * n : 2 * n + 2]) for n in range(24)]
    assert not all(padded[8:])
    again = [n for n in range(9, 24) if padded[n - 1] and padded[n]]
    assert again[-1] > padded.index(False)
    assert max(ours["peaks"][n] for n in again) <= budget


def test_checkpointing_of_sft_is_taken_over(tmp_path: Path) -> None:
    """It is on by default; a goal in memory switches it off, and bits stay."""
    plain = run(script("sft", ""), tmp_path)
    ours = run(script("sft", ""), tmp_path, "memory_budget_bytes=300kB,min_bytes=0")
    assert "activation checkpointing is switched off" in ours["printed"]
    assert ours["losses"] == plain["losses"]
    assert ours["weights"] == plain["weights"]
    saved = [row[2] for row in ours["reports"]]
    without = run(script("sft"), tmp_path, ALL)
    assert saved == [row[2] for row in without["reports"]]


def test_checkpointing_stays_on_without_a_goal(tmp_path: Path) -> None:
    ours = run(script("sft", ""), tmp_path, ALL)
    assert "activation checkpointing is on" in ours["printed"]


def test_offloading_of_trl_is_refused(tmp_path: Path) -> None:
    done = start(script("sft", "activation_offloading=True"), tmp_path, "fit")
    assert done.returncode != 0
    assert "activation_offloading=True; leave it out" in done.stderr
