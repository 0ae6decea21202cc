"""Batches of other sizes follow plans of their own."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ssdtrain
from ssdtrain.cache.bysize import PlansBySize
from ssdtrain.counters import Fallback, StepReport
from ssdtrain.plan.plan import Plan
from ssdtrain.plan.scaled import UpTo
from ssdtrain.transfer.device import CpuDevice, MemoryLevel
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.cache.heldsearch import Searches
from tests.ssdtrain.eventually import until
from tests.ssdtrain.unseen import Owner

WIDTH, ROWS = 16, 32
KEPT: dict[str, Any] = {
    "target": "host",
    "min_bytes": 0,
    "plan": "keep-all",
    "recompute": "off",
    "verify": "checksum",
}
"""With hooks, which tell what is saved."""
OUTGROWN = Fallback.PLAN_OUTGROWN.value
UNPLANNED = {Fallback.PLAN_MISMATCH.value, OUTGROWN}


class Block(nn.Module):
    """An MLP with a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks. What it is called with tells how many rows it works on, or nothing."""

    def __init__(self, *, tells: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self._tells = tells
        self.rows: list[Tensor] = []

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"] if self._tells else self.rows.pop()
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Training:
    """A model, an optimizer and maybe a session, step by step."""

    def __init__(self, settings: dict[str, Any] | None, *, tells: bool = True) -> None:
        torch.manual_seed(0)
        self._net, self._tells = Net(tells=tells), tells
        self._optimizer = torch.optim.SGD(self._net.parameters(), lr=0.1)
        self.session = ssdtrain.offload(self._net, **settings or KEPT)
        self._draw = torch.Generator().manual_seed(1)
        self.seen: list[Tensor] = []
        self.num_beside: list[int] = []
        """Lanes of each step that followed a plan beside the one in force."""

    def step(self, rows: int) -> StepReport:
        """One step of a batch of so many rows."""
        x = torch.randn(rows, WIDTH, generator=self._draw)
        self._net.rows = [x]
        loss = self._net({"x": x if self._tells else torch.ones(1)})
        loss.backward()
        grads = [p.grad for p in self._net.parameters() if p.grad is not None]
        self.seen += [loss.detach(), *(grad.clone() for grad in grads)]
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.num_beside.append(self.session.cache.cursor.num_beside)
        report = self.session.last_step
        assert report is not None
        return report

    def steps(self, lengths: list[int]) -> list[StepReport]:
        """One of each, and then no more."""
        reports = [self.step(rows) for rows in lengths]
        self.session.close()
        return reports


def within(budget_bytes: int) -> dict[str, Any]:
    """Settings under a budget."""
    return {
        "target": "host",
        "min_bytes": 0,
        "window_bytes": 1,
        "memory_budget_bytes": budget_bytes,
    }


def drawn(num: int) -> list[int]:
    """Lengths, from a quarter of the longest on."""
    draw = random.Random(0)
    return [draw.randint(ROWS // 4, ROWS) for _ in range(num)]


def share_gone(report: StepReport) -> float:
    """Of what autograd saved, the part that did not stay: moved, or made again where
    the search found that cheaper."""
    return 1.0 - report.bytes_kept / report.bytes_saved


@pytest.mark.usefixtures("roomy", "virtual_time")
def test_smaller_batches_keep_more() -> None:
    """Within the budget, bitwise; what fits as it is keeps everything."""
    first = 24  # a plan is tried before
    lengths = [ROWS, ROWS, *drawn(38)]
    plain, ours = Training(None), Training(None)
    kept = [report.saved_peak_bytes for report in plain.steps(lengths)]
    budget = kept[0] // 2
    ours = Training(within(budget))
    reports = ours.steps(lengths)
    assert same_bits(ours.seen, plain.seen)
    assert max(report.saved_peak_bytes for report in reports) <= budget
    usual = reports[lengths.index(ROWS, 10)]
    gone = share_gone(usual)
    assert gone > 0.0
    settled = list(zip(lengths, kept, reports, strict=True))[first:]
    for step, (rows, kept_bytes, report) in enumerate(settled, first):
        assert not UNPLANNED & set(report.fallbacks), rows
        if rows not in lengths[:step]:
            continue  # taken for the next one that was met
        if kept_bytes < 0.75 * budget:
            assert share_gone(report) == 0.0, rows
        elif rows < 0.7 * ROWS:
            assert share_gone(report) < 0.9 * gone, rows
    assert sum(ours.num_beside[first:]) > len(settled) // 2
    assert ours.session.cache.offloader.pool.used_bytes == 0


@pytest.mark.usefixtures("roomy", "virtual_time")
def test_places_in_pinned_memory_are_shared() -> None:
    """What leaves under several plans has one place for all of them."""
    ours = Training(None)
    budget = ours.step(ROWS).saved_peak_bytes // 2
    ours.session.close()
    ours = Training(within(budget))
    for rows in (ROWS, ROWS, *drawn(16), *drawn(8), *drawn(8)):
        ours.step(rows)
    tables = ours.session.cache.tables
    assert len(tables.tables) > 2
    pinned_bytes = ours.session.cache.offloader.pool.used_bytes
    assert sum(tables.place_sizes) == pinned_bytes
    assert len(tables.place_sizes) <= len(ours.session.plan.orders["model/0"])  # type: ignore[union-attr]
    ours.session.close()
    assert ours.session.cache.offloader.pool.used_bytes == 0


@pytest.mark.usefixtures("roomy", "virtual_time")
def test_arguments_that_tell_nothing_are_asked_once() -> None:
    """A lane that is larger than they told leaves its plan, and the budget holds."""
    lengths = [ROWS, ROWS // 2, ROWS // 2, *[ROWS // 2 + n for n in range(5)]]
    lengths += [ROWS] * 3 + drawn(8)
    plain = Training(None, tells=False)
    budget = plain.step(ROWS).saved_peak_bytes // 2
    plain.session.close()
    plain = Training(None, tells=False)
    plain.steps(lengths)
    ours = Training(within(budget), tells=False)
    reports = ours.steps(lengths)
    assert same_bits(ours.seen, plain.seen)
    assert max(report.saved_peak_bytes for report in reports) <= budget
    assert not ours.num_beside[-1]


@pytest.mark.usefixtures("roomy", "virtual_time")
def test_a_lane_that_is_larger_than_arguments_told_leaves_its_plan() -> None:
    ours = Training(None)
    budget = ours.step(ROWS).saved_peak_bytes // 2
    ours.session.close()
    plain, ours = Training(None), Training(within(budget))
    lengths = [ROWS, ROWS, *drawn(16)]
    for rows in lengths:
        ours.step(rows), plain.step(rows)
    by_size = ours.session.cache.cursor.by_size
    assert by_size.is_trusted and sum(ours.num_beside)
    # As if a batch of so many rows had been met with more elements.
    by_size.note(ROWS * WIDTH + 1, 0.3)
    by_size.note(2 * ROWS * WIDTH, 0.3)
    rows = ROWS + 1
    reports = [ours.step(rows), ours.step(rows), ours.step(rows - 1)]
    for each in (rows, rows, rows - 1):
        plain.step(each)
    assert OUTGROWN in reports[0].fallbacks and not by_size.is_trusted
    # The next plan has room for it, and nothing is guessed any more.
    assert all(not UNPLANNED & set(report.fallbacks) for report in reports[1:])
    assert ours.num_beside[-2:] == [0, 0]
    ours.session.close()
    plain.session.close()
    assert same_bits(ours.seen, plain.seen)


@pytest.mark.usefixtures("roomy", "virtual_time")
def test_all_regions_of_a_batch_that_is_too_large_run_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first one as well, whose first tensor comes when it has begun."""
    runs, usual = Owner(0), Block.forward
    count = runs.proxy()

    def forward(block: Block, x: Tensor) -> Tensor:
        count.value += 1
        return usual(block, x)

    monkeypatch.setattr(Block, "forward", forward)
    ours = Training(None)
    budget = int(1.2 * ours.step(ROWS // 2).saved_peak_bytes)
    ours.session.close()
    ours = Training(within(budget))
    for _ in range(16):
        ours.step(ROWS // 2)
    assert ours.session.plan is not None
    found = []
    for rows in (ROWS // 2, ROWS):
        runs.value = 0
        found.append((OUTGROWN in ours.step(rows).fallbacks, runs.value))
    ours.session.close()
    assert found[0] == (False, len(ours._net.layers))
    assert found[1] == (True, 2 * len(ours._net.layers))


def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are searched for beside training, as on a GPU, where regions run again."""
    monkeypatch.setattr(CpuDevice, "runs_beside", True)
    monkeypatch.setattr(CpuDevice, "capacity_bytes", lambda device: 1)
    monkeypatch.setattr(CpuDevice, "memory", lambda device: MemoryLevel(0, 0, 0, 0))


def test_before_there_is_a_plan_batches_follow_what_needs_no_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The short ones keep everything, others run some regions again, within the
    budget; no step of the search runs them all."""
    beside(monkeypatch)
    ours = Training(None)
    budget = int(0.6 * ours.step(ROWS).saved_peak_bytes)
    ours.session.close()
    searches = Searches(monkeypatch)
    searches.are_held = True
    plain, ours = Training(None), Training(within(budget))
    draw, lengths = random.Random(1), []
    searching: dict[int, list[StepReport]] = {}

    def step() -> None:
        rows = ROWS if len(lengths) < 3 else draw.choice([ROWS // 4, ROWS // 2, ROWS])
        lengths.append(rows)
        plain.step(rows)
        report = ours.step(rows)
        plan = ours.session.plan
        # All of them, or as few as must: the clock decides.
        is_unsearched = plan is not None and "regions" in plan.policy
        if is_unsearched and len(lengths) > 7 and searches.are_held:
            searching.setdefault(rows, []).append(report)

    for _ in range(60):
        step()
    assert not ours.session.is_settled
    searches.are_held = False
    until(lambda: ours.session.is_settled, step)
    for _ in range(8):
        step()
    ours.session.close()
    plain.session.close()
    assert same_bits(ours.seen, plain.seen)
    for reports in searching.values():
        for report in reports:
            assert report.saved_peak_bytes <= budget
            assert not UNPLANNED & set(report.fallbacks)
    short, long = searching[ROWS // 4][-1], searching[ROWS][-1]
    assert short.bytes_recomputed == 0 and short.bytes_kept == short.bytes_saved
    assert long.bytes_recomputed > 0


EMPTY = {"model/0": ()}


def plans() -> tuple[Plan, Plan, Plan]:
    """Three that are told apart."""
    small, usual, large = (Plan(orders=EMPTY, policy=name) for name in "sul")
    return small, usual, large


def test_a_lane_takes_the_plan_with_the_least_room_that_is_enough() -> None:
    small, usual, large = plans()
    by_size = PlansBySize()
    by_size.follow(usual, [UpTo(2.0, large), UpTo(0.5, small)])
    for num_elements, ratio in ((100, 1.0), (50, 0.5), (10, 0.1), (180, 1.8)):
        by_size.note(num_elements, ratio)
    taken = {
        n: by_size.of(usual, 1.0, n).plan for n in (1, 10, 11, 50, 51, 100, 180, 181)
    }
    assert taken == {
        1: small,
        10: small,
        11: small,  # no larger than the one of 50
        50: small,
        51: usual,
        100: usual,
        180: large,
        181: None,  # larger than any that was met
    }
    assert by_size.of(usual, 1.0, 0).plan is usual
    assert by_size.of(large, 1.0, 10).plan is large  # another one is in force
    by_size.misled()
    assert by_size.of(usual, 1.0, 10).plan is usual


def test_a_batch_that_is_hardly_larger_than_the_plans_follows_it() -> None:
    """A hundredth, as a step of regions saved more than the observed one."""
    _, usual, large = plans()
    by_size = PlansBySize()
    by_size.follow(usual, [UpTo(2.0, large)])
    by_size.note(100, 1.005)
    by_size.note(110, 1.02)
    assert by_size.of(usual, 1.0, 100).plan is usual
    assert by_size.of(usual, 1.0, 110).plan is large
