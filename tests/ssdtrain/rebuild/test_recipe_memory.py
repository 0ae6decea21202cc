"""What is remembered of tensors that look alike."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from ssdtrain.rebuild import compiled
from ssdtrain.rebuild.compiled import MOST_EACH, Compiled, RecipeMemory


def made(num: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(num, dtype=dtype, requires_grad=True).sin()


class Recipe:
    """With some guards."""

    def __init__(self, asked: Any) -> None:
        self.guards = self if asked is None else asked


def recipe(asked: Any = None) -> Compiled:
    return cast(Compiled, Recipe(asked))


def test_what_asks_the_same_is_remembered_once() -> None:
    known, other = RecipeMemory(), recipe()
    known.add(made(4), other)
    for _ in range(MOST_EACH + 1):
        last = recipe("the same")
        known.add(made(4), last)
    assert list(known.of(made(4))) == [last, other]


def test_no_more_is_remembered_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "MOST_LOOKS", 2)
    known = RecipeMemory()
    for _ in range(MOST_EACH + 2):
        known.add(made(1), recipe())
    assert len(known.of(made(1))) == MOST_EACH
    known.add(made(2), recipe())
    assert known.of(made(1))  # was met after the other one
    known.add(made(3), recipe())
    assert known.of(made(1)) and known.of(made(3)) and not known.of(made(2))
