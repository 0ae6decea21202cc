"""A hundredth of the zoo, drawn: see `recipes/bench/safety/zoo.py` for all of it."""

import json
import random
from pathlib import Path

import pytest
import torch

from tests.ssdtrain.zoo.declared import declare

declare()

from tests.ssdtrain.zoo import judge, of_transformers  # noqa: E402

RESULTS = Path(__file__).resolve().parents[3] / "recipes/bench/results/safety"
SEED, NUM_TYPES = 44, 6
MOST_S = 5
"""What a type may have taken where all were judged: not the largest."""


def drawn() -> list[tuple[str, judge.Group]]:
    """Model types that were equal, and plans for each."""
    cells = json.loads((RESULTS / "zoo_cpu.json").read_text())["cells"]
    equal = [
        name.removeprefix("transformers/")
        for name, cell in sorted(cells.items())
        if name.startswith("transformers/")
        and cell["verdict"] == "equal"
        and cell["cell_s"] <= MOST_S
    ]
    draw = random.Random(SEED)
    return [(name, draw.choice(judge.GROUPS)) for name in draw.sample(equal, NUM_TYPES)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "group"),
    drawn(),
    ids=lambda value: value if isinstance(value, str) else "-".join(value.plans),
)
def test_a_model_type_is_equal(name: str, group: judge.Group, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    try:
        make, _ = of_transformers.maker(name)
    except of_transformers.Unfit as error:
        if "requires the timm library" in str(error):
            pytest.skip("timm is in the zoo's own environment alone")
        raise
    found = judge.verdict(make, str(tmp_path), [group])
    assert found["verdict"] == "equal", found
