"""A hundredth of the zoo, drawn: see `recipes/bench/safety/zoo.py` for all of it."""

import random
from pathlib import Path

import pytest
import torch

from tests.ssdtrain.zoo.declared import declare

declare()

from tests.ssdtrain.zoo import judge, of_transformers  # noqa: E402

SEED = 44
NUM_TYPES = 6
DRAWN = [
    (name, group)
    for draw in [random.Random(SEED)]
    for name in draw.sample(of_transformers.names(), NUM_TYPES)
    for group in [draw.choice(judge.GROUPS)]
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "group"), DRAWN, ids=[name for name, _ in DRAWN])
def test_a_model_type_is_equal(name: str, group: judge.Group, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    try:
        make, _ = of_transformers.maker(name)
    except of_transformers.Unfit as error:
        pytest.skip(str(error))
    found = judge.verdict(make, str(tmp_path), [group])
    assert found["verdict"] == "equal", found
