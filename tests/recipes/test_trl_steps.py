"""TRL's trainers, timed without their generation."""

import pytest

pytest.importorskip("trl")
from recipes.bench.models.trl_steps import measure


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # TRL's own, of transformers
def test_loss_and_backward_are_timed_and_equal() -> None:
    plain = measure("grpo", None, steps=3, tiny=True)
    ours = measure("grpo", 1 << 30, steps=3, tiny=True)
    assert len(plain["steps_ms"]) == 3 == len(ours["steps_ms"])
    assert plain["losses"] == ours["losses"] and len(set(plain["losses"])) == 3
    assert ours["moved_bytes"] + ours["rebuilt_bytes"] > 0
