"""Ranks whose plans are searched for beside training: one searches, all follow."""

import sys
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import ssdtrain
from ssdtrain.engines import plain
from ssdtrain.errors import ConfigError
from ssdtrain.observe import planner, searching
from ssdtrain.observe.searching import Searching
from ssdtrain.plan.agree import Peers
from ssdtrain.plan.profile import Profile
from ssdtrain.plan.search import Search
from ssdtrain.transfer.device import CpuDevice
from tests.ssdtrain.observe.searches import await_what_runs_beside

pytestmark = pytest.mark.usefixtures("virtual_time")

SETTINGS: dict[str, Any] = {"target": "host", "min_bytes": 1, "max_overhead": 1.0}
NUM_STEPS = 24
"""Behind them a plan may drift, and be searched for again."""


class Rank(Peers):
    """Ranks in one process that share a list of answers."""

    agree, is_alone, leads = True, True, False

    def __init__(self, answers: list[str], *, leads: bool) -> None:
        self.leads = leads
        self._answers = answers
        self._num_taken = 0

    def offer(self, answer: str) -> None:
        self._answers.append(answer)

    def offered(self) -> str | None:
        if self._num_taken == len(self._answers):
            return None
        self._num_taken += 1
        return self._answers[self._num_taken - 1]


class Ranks:
    """Two models that train in turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.searches: list[Search] = []
        self.answers: list[str] = []
        self.peers: list[Rank] = []
        monkeypatch.setattr(CpuDevice, "runs_beside", True)
        monkeypatch.setattr(searching, "Search", self._search)
        monkeypatch.setattr(planner, "choose", self._never)
        monkeypatch.setattr("ssdtrain.plan.search.choose", self._never)
        self.sessions: list[ssdtrain.Session] = []
        self._models: list[nn.Module] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        for leads in (True, False):
            peers = Rank(self.answers, leads=leads)
            self.peers.append(peers)
            monkeypatch.setattr(plain, "peers_of", lambda ranks, alone, own=peers: own)
            torch.manual_seed(0)
            parts = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)]
            model = nn.Sequential(*parts)
            self._models.append(model)
            self._optimizers.append(torch.optim.SGD(model.parameters(), lr=0.01))
            self.sessions.append(ssdtrain.offload(model, **SETTINGS, **settings))

    def _search(self, request: Any) -> Search:
        self.searches.append(Search(request))
        return self.searches[-1]

    def _never(self, *asked: Any) -> Any:
        raise AssertionError("searched on the training thread")

    def train(self, ranks: Sequence[int] = (0, 1)) -> None:
        """A step of each; a request is sent at once, its answer is waited for."""
        await_what_runs_beside(self.searches, *self.sessions)
        for rank in ranks:
            self._models[rank](torch.ones(16, 32)).sum().backward()
            self._optimizers[rank].step()
            self._optimizers[rank].zero_grad()

    def close(self) -> None:
        for session in self.sessions:
            session.close()


def test_one_rank_searches_and_all_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch)
    try:
        for _ in range(NUM_STEPS):
            ranks.train()
        first, second = ranks.sessions
        assert len(ranks.searches) == 1 and len(ranks.answers) == 1
        assert first.plan is not None and first.plan.prediction is not None
        assert first.plan == second.plan
        assert all(session.is_settled for session in ranks.sessions)
        assert all(len(own) for own in first.plan.orders.values())
    finally:
        ranks.close()


def test_all_ranks_hear_that_no_plan_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, memory_budget_bytes=1000)
    try:
        for rank in (0, 1):
            with pytest.raises(ConfigError, match="least reachable peak"):
                for _ in range(NUM_STEPS):
                    ranks.train([rank])
    finally:
        ranks.close()


def test_a_rank_that_does_not_know_whom_its_regions_meet_makes_no_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Collectives of a group that no mesh and no wrapper tells of."""
    monkeypatch.setattr(Profile, "communicates", property(lambda profile: True))
    ranks = Ranks(monkeypatch)
    try:
        assert all(peers.is_alone for peers in ranks.peers)
        for _ in range(NUM_STEPS):
            ranks.train()
        assert not ranks.searches
        assert all(session.plan is None for session in ranks.sessions)
    finally:
        ranks.close()


def test_ranks_that_do_not_agree_change_nothing_where_regions_meet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each would run other regions again, whose collectives meet others."""
    monkeypatch.setattr(Profile, "communicates", property(lambda profile: True))
    ranks = Ranks(monkeypatch)
    try:
        for peers in ranks.peers:
            peers.agree = peers.is_alone = False
        for _ in range(NUM_STEPS):
            ranks.train()
        assert not ranks.searches
        for session in ranks.sessions:
            assert session.plan is None and session.is_settled
    finally:
        ranks.close()


class Meeting(Rank):
    """Ranks that ask each other at the same steps; the leading one is first, and what
    it says counts for both."""

    is_alone = False
    told: ClassVar[dict[tuple[str, int], Any]] = {}
    ready: ClassVar[set[bool]] = set()
    due: ClassVar[list[int]] = [-1]

    def _said(self, own: Any, topic: str, step: int) -> Any:
        if self.leads:
            self.told[topic, step] = own
        return self.told[topic, step]

    def all_agree(self, own: bool, topic: str, step: int) -> bool:
        return bool(self._said(own, topic, step))

    def longest(self, own: Sequence[float], topic: str, step: int) -> tuple[float, ...]:
        return tuple(self._said(own, topic, step))

    def adopts(self, is_ready: bool, step: int) -> bool:
        if is_ready:
            self.ready.add(self.leads)
        if self.leads and len(self.ready) == 2 and self.due[0] < step:
            self.ready.clear()
            self.due[0] = step + 1
        return is_ready and step == self.due[0]


def test_no_rank_times_another_plan_while_one_searches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the leading one knows of its search; the others would wait for it."""
    monkeypatch.setattr(planner, "FIRST_LOOK", NUM_STEPS)
    monkeypatch.setattr(sys.modules[__name__], "Rank", Meeting)
    for name, value in (("told", {}), ("ready", set()), ("due", [-1])):
        monkeypatch.setattr(Meeting, name, value)
    begin, known = Searching.begin, list[Searching]()

    def noted(own: Searching, *asked: Any) -> Any:
        known.append(own)
        return begin(own, *asked)

    monkeypatch.setattr(Searching, "begin", noted)
    ranks = Ranks(monkeypatch)
    try:
        for _ in range(NUM_STEPS):
            ranks.train()
        assert all(session.is_settled for session in ranks.sessions)
        with monkeypatch.context() as searched:
            searches = property(lambda own: own is known[0])  # the first rank's
            searched.setattr(Searching, "is_under_way", searches)
            for _ in range(NUM_STEPS):
                ranks.train()
        Meeting.told.clear()
        for _ in range(NUM_STEPS):
            ranks.train()
        assert {topic for topic, _ in Meeting.told} >= {"look", "keep"}
    finally:
        ranks.close()
