"""TRL's trainers beside their own checkpointing, tiny ones on a CPU."""

import pytest

pytest.importorskip("trl")

from recipes.bench.models import trl_steps
from recipes.bench.models.trl_steps import NUM_TIMED, measure


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning:transformers")
@pytest.mark.parametrize("case", ["grpo", "sft"])
def test_both_columns_train_the_same(case: str) -> None:
    base = measure(case, None, 0.0, True)
    ours = measure(case, 0, 5.0, True)
    assert base["checkpoints"] and not ours["checkpoints"]
    steps = len(base["losses"])
    assert base["steps_before"] == trl_steps.NUM_WARM
    assert steps == trl_steps.NUM_WARM + NUM_TIMED and len(set(base["losses"])) > 1
    assert base["losses"] == ours["losses"][:steps]
    assert len(base["steps_ms"]) == len(ours["steps_ms"]) == NUM_TIMED
    away = ours["moved_bytes"] + ours["rebuilt_bytes"]
    assert ours["saved_bytes"] == away + ours["kept_bytes"]
    assert away > 0.3 * ours["saved_bytes"]
