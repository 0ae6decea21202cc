"""Ranks of one layer follow one plan; the stages of a pipeline each their own."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from torch import distributed
from torch.distributed import FileStore, HashStore

from ssdtrain.engines import peers
from ssdtrain.engines.peers import StorePeers
from ssdtrain.plan.agree import Peers, slowest
from ssdtrain.plan.choose import choose
from ssdtrain.plan.goal import Goal
from ssdtrain.plan.profile import AttentionPart, Profile, RegionRun
from tests.ranks import SOON_S
from tests.ssdtrain.plan import profiles as made

chain, links, with_links = made.chain, made.links, made.with_links

SAVED: Profile = made.drawn(3, 12)


def slower(profile: Profile, times: float, gb_per_s: float) -> Profile:
    """The same tensors on a slower rank, whose link others use as well."""
    marks = [
        replace(m, ms=m.ms * times * (1 + n % 2)) for n, m in enumerate(profile.marks)
    ]
    return replace(profile, marks=tuple(marks), links=links(gb_per_s), host_bytes=10**9)


def test_the_slowest_of_everything_is_planned_for() -> None:
    one, other = SAVED, slower(SAVED, 0.8, 7.0)
    merged = slowest([one, other])
    assert merged is not None
    for mark, mine, theirs in zip(merged.marks, one.marks, other.marks, strict=True):
        assert mark.ms == max(mine.ms, theirs.ms)
    assert merged.links.d2h == other.links.d2h, "the slower link"
    kind = one.lanes[0]
    held = [replace(item, frame_marks=n) for n, item in enumerate(one.kinds[kind])]
    found = slowest([one, replace(other, kinds={**one.kinds, kind: tuple(held)})])
    assert found is not None and found.kinds[kind] == tuple(held)
    assert merged.host_bytes == 10**9
    assert merged.signature() == one.signature()


def test_the_slowest_second_forward_is_planned_for() -> None:
    """Whichever rank it is of; what its attention saves is the least."""
    short, long = AttentionPart(items=(0,), ms=1.0), AttentionPart(items=(0,), ms=2.0)
    other = AttentionPart(items=(1,), ms=3.0)
    early = RegionRun(ms=9.0, host_ms=1.0, other_bytes=5, parts=(short,))
    late = RegionRun(
        ms=4.0, host_ms=2.0, other_bytes=7, parts=(long, other), communicates=True
    )
    kind = SAVED.lanes[0]
    ranks = [replace(SAVED, regions={kind: (run,)}) for run in (early, late)]
    wanted = RegionRun(
        ms=9.0, host_ms=2.0, other_bytes=7, parts=(short,), communicates=True
    )
    for order in (ranks, ranks[::-1]):
        merged = slowest(order)
        assert merged is not None and merged.regions == {kind: (wanted,)}


def test_the_order_of_ranks_does_not_change_the_plan() -> None:
    one, other = SAVED, slower(SAVED, 1.1, 12.0)
    plans = []
    for ranks in ([one, other], [other, one]):
        merged = slowest(ranks)
        assert merged is not None
        plans.append(choose(merged, Goal(max_overhead=0.05)))
    assert plans[0].orders == plans[1].orders
    assert choose(one, Goal(max_overhead=0.05)).orders != plans[0].orders


def test_ranks_that_saved_other_tensors_do_not_merge() -> None:
    one = SAVED
    kind, items = next(iter(one.kinds.items()))
    other = replace(one, kinds={kind: (replace(items[0], num_bytes=1), *items[1:])})
    assert slowest([one, other]) is None
    assert meet([one, other]) == [one, other, [0, 1]]
    assert Peers().agreed(one, 3, is_last=False) == one
    assert Peers().agreed(None, 3, is_last=False) is None


def meet(
    published: Sequence[Profile | None], step: int = 2, *, is_last: bool = False
) -> list[object]:
    """What each rank gets when all of them publish at once, and how many were alone."""
    store = HashStore()
    found: list[object] = [None] * len(published)
    alone: list[int] = []

    def rank(number: int) -> None:
        own = StorePeers(store, [4, 5], 4 + number, lambda: alone.append(number))
        found[number] = own.agreed(published[number], step, is_last=is_last)

    threads = [threading.Thread(target=rank, args=(n,)) for n in range(len(published))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [*found, sorted(alone)]


def test_profiles_pass_through_the_store() -> None:
    one, other = SAVED, slower(SAVED, 0.8, 7.0)
    first, second, alone = meet([one, other])
    assert first == second == slowest([one, other])
    assert alone == []


def test_all_observe_again_for_a_rank_without_a_profile() -> None:
    assert meet([SAVED, None]) == [None, None, []]
    assert meet([SAVED, None], is_last=True) == [SAVED, None, [0]]


def test_a_late_rank_is_waited_for_again() -> None:
    """Every time: the second observation ends no nearer to the others' than the first
    one."""
    store = HashStore()
    found: list[object] = []

    def late(number: int) -> None:
        own = StorePeers(store, [0, 1], number, lambda: found.append("alone"))
        for step in (1, 2, 3):
            time.sleep(number * 2 * peers.LATER_WAIT_S)
            found.append(own.agreed(SAVED, step, is_last=False))

    threads = [threading.Thread(target=late, args=(n,)) for n in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [SAVED] * 6


def test_a_rank_that_never_comes_is_waited_for_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers, "LATER_WAIT_S", 0.01)
    store, alone = HashStore(), [0]

    def missing() -> None:
        alone[0] += 1

    own = StorePeers(store, [0, 1], 0, missing, wait_s=0.05)
    assert own.agreed(SAVED, 2, is_last=False) is SAVED
    assert own.agreed(SAVED, 40, is_last=False) is SAVED
    assert alone == [2]
    # A session's number, what it wrote last and the last conclusion: no more.
    assert store.num_keys() == 3


def together(*acts: Callable[[StorePeers], object]) -> list[object]:
    """What each rank gets from its act, behind a profile that all have in common."""
    store = HashStore()
    found: list[object] = [None] * len(acts)

    def rank(number: int) -> None:
        own = StorePeers(store, range(len(acts)), number, lambda: None)
        own.agreed(SAVED, 1, is_last=False)
        found[number] = acts[number](own)

    threads = [threading.Thread(target=rank, args=(n,)) for n in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_all_must_say_yes_and_the_longest_time_counts() -> None:
    yes = lambda peers: peers.all_agree(True, "plain", 1)  # noqa: E731
    no = lambda peers: peers.all_agree(False, "plain", 1)  # noqa: E731
    assert together(yes, yes, yes) == [True] * 3
    assert together(yes, no, yes) == [False] * 3
    times = [
        lambda peers, own=own: peers.longest(own, "times", 3)
        for own in ((1.0, 9.0), (4.0, 2.0))
    ]
    assert together(*times) == [(4.0, 9.0)] * 2


def test_the_first_rank_searches_for_all() -> None:
    plans = ["one", "two"]
    offered = threading.Event()

    def first(peers: StorePeers) -> object:
        assert peers.leads
        for plan in plans:
            peers.offer(plan)
        offered.set()
        return plans

    def second(peers: StorePeers) -> object:
        assert not peers.leads
        offered.wait(SOON_S)
        found = [peers.offered() for _ in range(5)]
        return [plan for plan in found if plan is not None]

    assert together(first, second) == [plans, plans]


def in_turn(
    num_ranks: int, act: Callable[[StorePeers, int, int], object], num_steps: int
) -> list[list[object]]:
    """What each rank gets in each step: they take turns, as ranks do that share
    layers."""
    turns = threading.Barrier(num_ranks)

    def rank(peers: StorePeers, number: int) -> list[object]:
        found = []
        for step in range(2, 2 + num_steps):
            turns.wait(SOON_S)
            found.append(act(peers, number, step))
        return found

    acts = [lambda peers, n=n: rank(peers, n) for n in range(num_ranks)]
    return together(*acts)  # type: ignore[return-value]


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_that_drifts_asks_all_to_observe_at_one_step(number: int) -> None:
    """Also if others ask in other steps: they observe once."""

    def act(peers: StorePeers, own: int, step: int) -> bool:
        wanted = (own == number and step in (5, 6)) or (own == 2 and step == 7)
        peers.adopts(False, step)
        found = peers.observes(wanted, step)
        if found:
            peers.agreed(SAVED, step, is_last=False)
        return found

    found = in_turn(3, act, 20)
    assert found[0] == found[1] == found[2]
    assert sum(map(bool, found[0])) == 1, "once"


@pytest.mark.parametrize("late", [0, 1])
def test_a_plan_is_followed_by_all_at_one_step(late: int) -> None:
    """At the one at which the last of them has the memory for it, or behind it."""

    def act(peers: StorePeers, own: int, step: int) -> tuple[bool, bool]:
        if step == 4 and own == 0:
            peers.offer("a plan")
        if step == 6 and own == 1:
            assert peers.offered() == "a plan"
        is_ready = step >= (11 if own == late else 7)
        found = peers.adopts(is_ready, step), peers.observes(False, step)
        return found

    first, second = in_turn(2, act, 24)
    assert first == second
    steps = [2 + n for n, (adopts, _) in enumerate(first) if adopts]
    assert steps and 11 <= steps[0] <= 11 + 3 * peers.LOOK_EVERY
    assert len(steps) == 1, "once"


def test_all_leave_the_room_that_one_lacks_at_one_step() -> None:
    """What was offered before is not followed, what is offered behind it is."""

    def act(peers: StorePeers, own: int, step: int) -> tuple[object, ...]:
        if own == 0 and step in (4, 16):
            peers.offer("a plan")
        offered = own == 0 or (step >= 16 and peers.offered() is not None)
        taken[own] = step >= 16 and (offered or taken[own])
        exceeds = {(1, 5): 100, (2, 5): 300, (1, 7): 200}.get((own, step), 0)
        adopts = peers.adopts(taken[own], step)
        return adopts, peers.exceeded(exceeds, step), peers.observes(False, step)

    taken = [False] * 3
    found = in_turn(3, act, 30)
    assert found[0] == found[1] == found[2]
    left = [more for _, more, _ in found[0] if more]  # type: ignore[misc]
    assert left == [300], "once, as much as who lacks most"
    adopted = [2 + n for n, (adopts, _, _) in enumerate(found[0]) if adopts]  # type: ignore[misc]
    assert len(adopted) == 1 and adopted[0] > 16


def test_a_decision_is_waited_for_where_regions_meet() -> None:
    """A rank that went on would run other regions again than the first one."""
    told: list[str] = []
    run = RegionRun(communicates=True)
    met = replace(SAVED, regions={kind: (run,) for kind in SAVED.kinds})
    store = HashStore()

    def rank(number: int) -> None:
        own = StorePeers(store, [0, 1], number, lambda: None)
        own.agreed(met, 1, is_last=False)
        own.observes(number == 1, 2)
        time.sleep(0.2 * (1 - number))  # the first is behind
        for step in range(3, 9):
            if own.observes(False, step):
                told.append(f"{number} at {step}")
                return

    threads = [threading.Thread(target=rank, args=(n,)) for n in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(told)[0][4:] == sorted(told)[1][4:], told
    assert len(told) == 2


class GoneStore(HashStore):
    """Its owner leaves after so many writes."""

    num_left = 1

    def _allowed(self) -> None:
        self.num_left -= 1
        if self.num_left < 0:
            raise RuntimeError("Connection reset by peer")

    def set(self, key: str, value: bytes) -> None:
        self._allowed()
        super().set(key, value)

    def delete_key(self, key: str) -> bool:
        self._allowed()
        return super().delete_key(key)


def test_a_store_that_goes_away_ends_no_training() -> None:
    alone: list[int] = []
    store = GoneStore()
    own = StorePeers(store, [0], 0, lambda: alone.append(1), wait_s=0.05)
    store.num_left = 2
    assert own.agreed(SAVED, 3, is_last=False) == SAVED
    own.offer("a plan")
    assert own.observes(True, 5) is False
    assert own.longest([1.0], "plain", 6) == (1.0,)
    assert own.agreed(SAVED, 8, is_last=False) == SAVED
    assert alone, "it is counted"


def test_a_rank_outside_of_the_mesh_plans_alone(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert type(peers.peers_of([1, 2], lambda: None)) is Peers
    finally:
        distributed.destroy_process_group()


def test_who_planned_alone_observes_alone() -> None:
    own = StorePeers(HashStore(), [0, 1], 0, lambda: None)
    assert own.observes(True, 5)
    assert own.leads
    assert own.all_agree(True, "plain", 5)
