"""A recipe that was found and admitted once, as what must be asked at every step.

[Note: compiled recipes]
A recipe is a function of its producer's answers: with the same answers it gives the
same expression. So the search for it leaves a `Trail` of questions and answers. Where
all of them hold of another graph, the expression is right of that graph, too, with the
operands that it names; where one does not, somebody has to search. What is asked again
is all that a rule of this package rests on: which operators made the tensor, with which
constants (0.0 is not -0.0), which tensors they saved, in which layout, whether these
are unchanged, why nobody can have written to those that nobody saved, and which epsilon
a normalization was called with. Admission is not asked again: layouts and constants are
those of the class that was compared. An edge that led nowhere is not asked for again
either: it was as good as absent, and the recipe found another way.
(tests/ssdtrain/remat/test_compiled.py)
"""

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ssdtrain.remat.expression import Expression, Held, Layout
from ssdtrain.remat.questions import (
    Asking,
    AtLeaf,
    Edge,
    IsKind,
    Noted,
    Opaque,
    Question,
    Saved,
    Store,
)


class TrailMark(NamedTuple):
    """A place in a trail to go back to."""

    num_questions: int
    num_operands: int
    num_nodes: int


class Trail:
    """What a search has asked so far, with the answers."""

    def __init__(self, node: Any, output: int) -> None:
        self.questions: list[Question] = [IsKind.of(node, output)]
        self.operands: list[Held] = []
        """In the order of the questions for them."""
        self.narrow: torch.dtype | None = None
        """The tensor itself is stored in this dtype: the last operand."""
        self.num_nodes = 1

    def ask(self, question: Question) -> None:
        """Remember a question."""
        self.questions.append(question)

    def step(self, edge: Edge) -> int:
        """Follow an edge; the number of the node there."""
        self.questions.append(edge)
        self.num_nodes += 1
        return self.num_nodes - 1

    def take(self, question: Question, held: Held) -> None:
        """Remember a question whose answer is an operand."""
        self.questions.append(question)
        self.operands.append(held)

    def store(self, dtype: torch.dtype, held: Held) -> None:
        """The tensor itself was stored in another dtype."""
        self.narrow = dtype
        self.operands.append(held)

    def mark(self) -> TrailMark:
        """Where it is now."""
        return TrailMark(len(self.questions), len(self.operands), self.num_nodes)

    def back_to(self, mark: TrailMark) -> None:
        """Forget what led nowhere."""
        del self.questions[mark.num_questions :]
        del self.operands[mark.num_operands :]
        self.num_nodes = mark.num_nodes


class Compiled:
    """A recipe of one place in the step. See [Note: compiled recipes]."""

    __slots__ = (
        "_covered",
        "_device",
        "_is_in_order",
        "_narrow",
        "_order",
        "_questions",
        "copy_place",
        "expression",
        "layout",
    )

    def __init__(
        self, expression: Expression, trail: Trail, base: Tensor, order: tuple[int, ...]
    ) -> None:
        self.expression = expression
        """How it is made; its operands' holders are those of no graph."""
        self._questions = _each_once(trail.questions)
        self._narrow = trail.narrow
        self.copy_place: int | None = None
        """Which of `expression.held` is the tensor itself in a smaller dtype."""
        if trail.narrow is not None:
            self.copy_place = order.index(len(trail.operands) - 1)
        self.layout = Layout.of(base)
        self._device = base.device
        self._order = order
        self._is_in_order = order == tuple(range(len(trail.operands)))
        self._covered = tuple(
            at for at, held in zip(order, expression.held, strict=True) if held.is_noted
        )

    @property
    def asked(self) -> Hashable:
        """What it asks: two that ask the same are right of the same graphs."""
        return tuple((type(question), question) for question in self._questions)

    @classmethod
    def of(
        cls, expression: Expression, trail: Trail, base: Tensor
    ) -> "Compiled | None":
        """What the search for the expression of this tensor has asked; None: one of the
        answers may not be had again."""
        questions = trail.questions
        if any(isinstance(question, Opaque) for question in questions):
            return None
        if trail.narrow is not None and trail.operands[-1].stored_bytes == 0:
            return None  # it is not the last one
        places = {id(held): at for at, held in enumerate(trail.operands)}
        if any(id(held) not in places for held in expression.held):
            return None
        order = tuple(places[id(held)] for held in expression.held)
        return cls(expression.without_holders(), trail, base, order)

    def holds(self, of: Asking) -> bool:
        """Whether it is right of this graph; False: search again."""
        base = of.tensor
        if of.keeper.is_altered() or base._version or base.storage_offset():
            return False
        if base.is_conj() or base.is_neg() or base.device != self._device:
            return False
        if not self.layout.is_of(base):
            return False
        for question in self._questions:
            if not question.holds(of):
                return False
        if not self._covered:
            return True
        return all(id(of.held[at].owner) in of.owners for at in self._covered)

    def operands(self, of: Asking, store: Store | None = None) -> list[Held]:
        """The operands in the order of `expression.held`, once `holds` has answered.

        What takes the tensor's place in a smaller dtype is stored now.

        Args:
            store: takes it over; None: the keeper finds out what becomes of it.
        """
        found = of.held
        if self._is_in_order and self._narrow is None:
            return found
        if self._narrow is not None:
            stored = of.keeper.narrowed(of.tensor, self._narrow, store)
            found = [*found, stored]
        return [found[at] for at in self._order]


_GIVING = (AtLeaf, Edge, Noted, Saved)
"""Questions that give a node or an operand: none may be left out."""


def _each_once(questions: list[Question]) -> tuple[Question, ...]:
    """Leave out what was asked before. Two questions of other kinds are equal as the
    tuples that they are, and both are asked."""
    found: dict[object, Question] = {}
    for number, question in enumerate(questions):
        once = number if isinstance(question, _GIVING) else (type(question), question)
        found.setdefault(once, question)
    return tuple(found.values())
