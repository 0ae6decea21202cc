"""Trainers whose wheels need more than a test environment has: Axolotl, torchtitan,
verl, LLaMA-Factory v1. Each script runs with the real package if it is there
(`make integrations`), else with a stand-in that keeps to the recorded interface.
"""

import importlib.util
import os
from pathlib import Path

import pytest

from tests.ssdtrain.integrations.scripts import ALL, assert_equal_bits, run, start
from tests.ssdtrain.integrations.trainer_scripts import SCRIPTS

STANDINS = Path(__file__).with_name("standins")
ONLY = os.environ.get("SSDTRAIN_INTEGRATION")
"""One trainer, whose real package must be there."""


def paths(trainer: str) -> str:
    """Where Python looks for the trainer."""
    inherited = os.environ.get("PYTHONPATH", "")
    if ONLY is not None:
        assert importlib.util.find_spec(trainer) is not None, f"install {trainer}"
    return os.pathsep.join(
        [str(STANDINS.parents[3]), inherited, *([str(STANDINS)] if ONLY is None else [])]
    )


@pytest.mark.slow
@pytest.mark.parametrize("trainer", SCRIPTS)
def test_equal_bits(trainer: str, tmp_path: Path) -> None:
    if ONLY not in (None, trainer):
        pytest.skip(f"SSDTRAIN_INTEGRATION={ONLY}")
    plain, ours, setting = SCRIPTS[trainer]
    more = {"PYTHONPATH": paths(trainer)}
    assert_equal_bits(
        run(ours, tmp_path, ALL if setting else None, **more),
        run(plain, tmp_path, **more),
    )
