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


def test_what_looks_alike_is_found_the_last_one_first() -> None:
    known, first, second = RecipeMemory(), recipe(), recipe()
    assert not known.of(made(4))
    known.add(made(4), first)
    known.add(made(4), second)
    assert list(known.of(made(4))) == [second, first]


def test_what_asks_the_same_is_remembered_once() -> None:
    known, other = RecipeMemory(), recipe()
    known.add(made(4), other)
    for _ in range(MOST_EACH + 1):
        last = recipe("the same")
        known.add(made(4), last)
    assert list(known.of(made(4))) == [last, other]


def other_operator() -> Tensor:
    return torch.ones(4, requires_grad=True).cos()


def other_stride() -> Tensor:
    return torch.ones(2, 2, requires_grad=True).t().sin()


@pytest.mark.parametrize(
    "other",
    [
        made(5),
        made(4, torch.float64),
        other_operator(),
        other_stride(),
        made(4).view(2, 2).sin(),
    ],
)
def test_what_looks_otherwise_is_not_asked(other: Any) -> None:
    known = RecipeMemory()
    known.add(made(4), recipe())
    known.add(torch.ones(2, 2, requires_grad=True).tan(), recipe())
    assert not known.of(other)


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
