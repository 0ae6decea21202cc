"""A plan from when it was found to when it is followed."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from ssdtrain.observe.adoption import Adoption
from ssdtrain.plan.agree import Alone
from ssdtrain.plan.choose import QUICK_MARKS, choose
from ssdtrain.plan.goal import Goal
from ssdtrain.plan.scaled import Growth
from tests.ssdtrain.observe.parts import Cache, promise
from tests.ssdtrain.plan.profiles import chain


@dataclass
class Pool:
    is_prepared: bool = True
    asked: list[list[int]] = field(default_factory=list)

    def prepare(self, sizes: list[int], soon: Any) -> None:
        self.is_prepared = False
        self.asked.append(sizes)


def adoption(peers: Any = None) -> tuple[Adoption, Pool, Any]:
    pool = Pool()
    cache: Any = Cache(
        offloader=SimpleNamespace(pool=pool), tables=SimpleNamespace(place_sizes=())
    )
    return Adoption(cache, peers or Alone()), pool, cache


def test_a_plan_is_due_when_its_pinned_memory_is_there() -> None:
    own, pool, cache = adoption()
    profile = chain(16)
    plan = choose(profile, Goal(memory_budget_bytes=10_000_000), QUICK_MARKS)
    own.take(plan)
    own.prepare(profile, 1.5, Growth())
    moved = [each for each in plan.orders["model/0"] if each.release_after > 0]
    assert pool.asked == [[round(1.5 * each.num_bytes) for each in moved]]
    assert moved and own.due(1) is None and own.taken is plan
    fixed = moved[0].name
    own.prepare(profile, 1.5, Growth(fixed=(fixed,)))
    assert pool.asked.pop()[0] == moved[0].num_bytes
    pool.is_prepared = True
    assert own.due(2) is plan and own.taken is None and own.due(3) is None
    own.take(plan)
    cache.device.runs_beside = False
    own.prepare(profile, 1.0, Growth())
    assert len(pool.asked) == 1 and own.due(4) is plan


def test_ranks_follow_it_when_all_of_them_are_ready() -> None:
    ready: list[tuple[bool, int]] = []

    class Others(Alone):
        is_alone = False

        def adopts(self, is_ready: bool, step: int) -> bool:
            ready.append((is_ready, step))
            return step == 3

    own, pool, _ = adoption(Others())
    plan = promise(100.0)
    assert own.due(1) is None
    own.take(plan)
    pool.is_prepared = False
    assert own.due(2) is None
    assert own.due(3) is plan, "they say so"
    assert ready == [(False, 1), (False, 2), (False, 3)]
    own.take(plan)
    assert own.due(4, is_now=True) is plan and len(ready) == 3
    own.take(plan)
    own.drop()
    assert own.due(5, is_now=True) is None
