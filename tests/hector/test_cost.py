"""What the cost model reckons a step to cost its host and its device."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from hector.cost import CostModel, DeviceModel
from hector.emit.schedules import TraversalSchedule, default_schedule
from hector.ir.builder import Builder
from hector.ir.kernels import ParameterOp, SegmentMapping, Traversal
from hector.ir.types import Domain, Index
from hector.passes.lifetimes import constants
from hector.passes.lower import lower
from hector.passes.pipeline import Optimizations
from tests.hector.layer_models import plans

BOTH = Optimizations(compact=True, reorder=True)


class Counts:
    """A graph of known sizes."""

    def __init__(self, longest: int) -> None:
        self.largest = longest

    def rows(self, domain: Domain) -> int:
        kinds = {Domain.ETYPE: 10, Domain.NTYPE: 3, Domain.GLOBAL: 1, Domain.NODE: 500}
        return kinds.get(domain, 5000)

    def longest(self, domain: Domain, index: Index) -> int:
        return self.largest


def walks(model: str, settings: Optimizations) -> Iterator[Traversal]:
    for _, plan in plans(model, 64, settings):
        yield from (k for k in plan.kernels if isinstance(k, Traversal))


def test_a_product_left_to_pytorch_costs_the_host_more_than_a_launch() -> None:
    b = Builder()
    w1 = b.input("w1", Domain.ETYPE, (1, 64, 64))
    w2 = b.input("w2", Domain.GLOBAL, (1, 64, 64))
    v = b.input("v", Domain.GLOBAL, (1, 64))
    (wide,) = lower([b.einsum("hkn,hnm->hkm", w1, w2)]).kernels
    (narrow,) = lower([b.einsum("hkn,hn->hk", w1, v)]).kernels
    device = DeviceModel()
    model = CostModel(Counts(10), device)
    assert isinstance(wide, ParameterOp)
    assert model.host_seconds(wide) == device.product_seconds
    assert model.host_seconds(narrow) == device.launch_seconds
    view = ParameterOp(out=b.reshape(v, (64, 1)))
    assert model.host_seconds(view) == 0
    # What it reads and writes, by bytes.
    assert model.work(narrow).moved_bytes == 4 * (10 * 64 * 64 + 64 + 10 * 64)


def test_reordered_attention_costs_the_host_no_more_than_plain() -> None:
    """Its products are kernels like any other."""
    model = CostModel(Counts(10), DeviceModel())

    def host(settings: Optimizations) -> float:
        found = (p for n, p in plans("rgat", 64, settings) if "inference" not in n)
        return sum(model.host_seconds(k) for p in found for k in p.kernels)

    assert host(BOTH) <= 1.1 * host(Optimizations())


@pytest.mark.parametrize("longest", [10, 100000])
def test_large_groups_are_a_launch_of_their_own(longest: int) -> None:
    counts, device = Counts(longest), DeviceModel()
    seen = 0
    for k in walks("rgat", BOTH):
        first = default_schedule(k, counts)
        assert isinstance(first, TraversalSchedule)
        split = first.mapping is SegmentMapping.SPLIT
        launches = 2 if split and longest > first.heavy_rows else 1
        seconds = CostModel(counts, device).host_seconds(k)
        assert seconds == launches * device.launch_seconds
        seen += launches == 2
    assert (seen > 0) == (longest > 10)


def test_what_is_made_once_costs_nothing() -> None:
    """RGCN divides by degrees: the quotient is kept from the first call on."""
    model = CostModel(Counts(10), DeviceModel())
    (plan,) = (p for n, p in plans("rgcn", 64, BOTH) if "inference" in n)
    (once,) = constants(plan)
    rest = tuple(k for k in plan.kernels if once not in k.outputs)
    assert len(rest) == len(plan.kernels) - 1
    assert model.step_seconds([plan]) == model.step_seconds(
        [replace(plan, kernels=rest, given=(*plan.given, once))]
    )


def test_the_schedule_of_a_walk_is_asked_for_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A first call prices every setting: looking twice is a tenth of its time."""
    asked: list[int] = []

    def counted(kernel: Traversal, *more: Any) -> TraversalSchedule | None:
        asked.append(id(kernel))
        found = default_schedule(kernel, *more)
        return found if isinstance(found, TraversalSchedule) else None

    monkeypatch.setattr("hector.cost.default_schedule", counted)
    model = CostModel(Counts(10), DeviceModel())
    parts = [plan for _, plan in plans("rgat", 64, BOTH)]
    assert model.step_seconds(parts) == model.step_seconds(parts)
    assert asked and len(asked) == len(set(asked))
