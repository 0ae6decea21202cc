"""Rows meet other views of the bytes they expect: as large, but read otherwise."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ssdtrain
from ssdtrain.cache.rows import HostAgainRow, HostRow, StayRow
from ssdtrain.plan.plan import Plan
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.cache.plans import all_moved, every_other_moved
from tests.ssdtrain.cache.steps import Step, train
from tests.ssdtrain.cache.test_rebuilt_rows import rebuilding

WIDTH, ROWS = 8, 4
SETTINGS: dict[str, Any] = {"target": "host", "min_bytes": 1, "max_overhead": 0.0}
FIRST_TABLE, CHANGE = 4, 6
NUM_STEPS = 9

Program = Callable[[nn.Module, Tensor, bool], Tensor]
"""The model, a batch, and whether it is to save the other view."""
Planning = Callable[[ssdtrain.Session], Plan]


class Net(nn.Module):
    """Two weights, with which a program makes pairs of numbers."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)
        self.b = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)
        self.program = program

    def forward(self, x: Tensor, other: bool) -> Tensor:
        return self.program(self, x, other)


def conjugated_again(net: Any, x: Tensor, other: bool) -> Tensor:
    z = torch.complex(x @ net.a, x @ net.b)
    p = z * z.exp()
    return torch.view_as_real((z.conj() if other else z) * p).square().mean()


def conjugated_first(net: Any, x: Tensor, other: bool) -> Tensor:
    z = torch.complex(x @ net.a, x @ net.b)
    p = (z.conj() if other else z) * z.exp()
    return torch.view_as_real(z * p).square().mean()


def negated_again(net: Any, x: Tensor, other: bool) -> Tensor:
    """The imaginary part of a conjugate is a negated view of the same bytes."""
    z = torch.complex(x @ net.a, x @ net.b)
    p = z * z.exp()
    part = z.conj().imag if other else z.imag
    return torch.view_as_real(p).square().mean() + (part * part.exp()).mean()


def pairs_again(net: Any, x: Tensor, other: bool) -> Tensor:
    """A complex view of what was saved as pairs."""
    pairs = torch.stack((x @ net.a, x @ net.b), -1)
    e = pairs * pairs.exp()
    loss = (pairs * e).square().mean()
    if not other:
        return loss + (pairs * e.sin()).mean()
    made = torch.view_as_complex(pairs) * torch.view_as_complex(e).exp()
    return loss + torch.view_as_real(made).square().mean()


def batch(number: int) -> Tensor:
    torch.manual_seed(100 + number)
    return torch.randn(ROWS, WIDTH) * 0.3


def one(at: int) -> Step:
    return lambda net, number: net(batch(number), number >= at)


def two(at: int) -> Step:
    """Two forwards before their backward: the second one's places are new."""

    def step(net: nn.Module, number: int) -> Tensor:
        first: Tensor = net(batch(number), False)
        if number < at:
            return first
        second: Tensor = net(batch(number) + 0.1, True)
        return first + second

    return step


@contextmanager
def equal(
    program: Program, step: Step, planning: Planning
) -> Iterator[ssdtrain.Session]:
    """Every step is bitwise that without ssdtrain."""
    expected = list(train(Net(program), step, NUM_STEPS))
    with ssdtrain.offload(net := Net(program), **SETTINGS) as session:
        planned = False
        for number, found in enumerate(train(net, step, NUM_STEPS)):
            assert all(each.isfinite().all() for each in found)
            assert same_bits(found, expected[number]), f"step {number}"
            if session.plan is not None and not planned:
                session.follow(planning(session))
                planned = True
        yield session


def kinds_of(session: ssdtrain.Session) -> set[type]:
    (table,) = session.cache.tables.tables.values()
    return {type(row) for row in table.rows}


PROGRAMS = [conjugated_again, conjugated_first, negated_again, pairs_again]


@pytest.mark.parametrize("planning", [all_moved, every_other_moved, rebuilding])
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("at", [FIRST_TABLE, CHANGE])
def test_another_view_of_the_same_bytes(
    program: Program, planning: Planning, at: int
) -> None:
    with equal(program, one(at), planning) as session:
        first = StayRow if planning is rebuilding else HostRow
        assert {first, HostAgainRow} <= kinds_of(session)


def repeated(net: Any, x: Tensor, other: bool) -> Tensor:
    """What is as large as its base, but repeats one of its rows."""
    h = x @ net.a
    if other:
        h = h[1:2].expand(h.shape)
    return (h * (x @ net.b)).square().mean()


@pytest.mark.parametrize("step", [one(FIRST_TABLE), one(CHANGE), two(CHANGE)])
def test_no_place_is_made_for_bytes_that_repeat(step: Step) -> None:
    """Its copy back would write beyond the tensor that it fills."""
    with equal(repeated, step, all_moved) as session:
        (table,) = session.cache.tables.tables.values()
        places = [p for row in table.rows if type(row) is HostRow for p in row.free]
        dense = torch.ops.aten.is_non_overlapping_and_dense
        assert places and all(dense(place.memory) for place in places)
