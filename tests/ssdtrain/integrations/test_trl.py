"""TRL's trainers with SSDTRAIN set: the same losses and weights, fewer bytes kept."""

import pytest

pytest.importorskip("trl")

from pathlib import Path

from tests.ssdtrain.integrations.scripts import moved, run
from tests.ssdtrain.integrations.trl_scripts import script

ALL = "plan=offload-all,min_bytes=0,target=host,window_bytes=16384"
WHICH = ("sft", "sft lora", "dpo", "dpo lora", "grpo", "grpo lora", "rloo", "reward")


@pytest.mark.slow
@pytest.mark.parametrize("which", WHICH)
def test_equal_bits(which: str, tmp_path: Path) -> None:
    plain = run(script(which), tmp_path)
    ours = run(script(which), tmp_path, ALL)
    assert plain["reports"] == []
    assert ours["losses"] == plain["losses"] and len(ours["losses"]) == 4
    assert len(set(ours["losses"])) > 1  # it does train
    assert ours["weights"] == plain["weights"]
    assert len(ours["reports"]) == 4
    for offloaded, rebuilt, saved in ours["reports"]:
        assert offloaded + rebuilt > 0.5 * saved > 0
    assert moved(ours) > 0
