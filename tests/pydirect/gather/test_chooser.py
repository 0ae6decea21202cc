"""What a gather learns of its indices and of its times, and what it then takes."""

import json
import os
from collections.abc import Iterator
from pathlib import Path as FilePath
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pydirect.gather import chooser as module
from pydirect.gather.bounds import GatherIndexError
from pydirect.gather.chooser import Chooser, Look, Survey
from pydirect.gather.cpu import Staging
from pydirect.gather.engine import Engine, Tuning
from pydirect.gather.front import BoundTable, Front, process_counters
from pydirect.gather.request import Path, Request
from pydirect.gather.trials import CellTimes, Trial, Trials
from pydirect.kernels.cache import CacheDirectoryError
from pydirect.memory import Reach

CPU = torch.device("cpu")
TABLE = torch.zeros(5000, 512, dtype=torch.uint8)


class Event:
    """A copy on the CPU has arrived when it was made."""

    arrived = True

    def record(self, stream: object) -> None: ...

    def query(self) -> bool:
        return Event.arrived


def request_of(index: torch.Tensor, table: torch.Tensor = TABLE) -> Request:
    out = torch.zeros(len(index), table.shape[1], dtype=torch.uint8)
    return Request(table=table, index=index, out=out)


class Watched(Survey):
    """A survey asked as gathers ask it: look, gather, follow."""

    started = 0

    def call(self, index: torch.Tensor, table: torch.Tensor = TABLE) -> Look:
        request = request_of(index, table)
        found = self.look(request)
        self.follow(request, None)
        return found

    def _start(self, index: torch.Tensor, num_blocks: int) -> Any:
        self.started += 1
        return super()._start(index, num_blocks)


@pytest.fixture
def survey(host_module: Any, monkeypatch: pytest.MonkeyPatch) -> Watched:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    stream = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(Event, "arrived", True)
    return Watched(host_module, CPU, 4)


def test_repeats_and_runs_are_found_a_call_later(survey: Watched) -> None:
    hot = torch.randint(0, 50, (5000,))
    assert survey.call(hot) == Look(), "the first call cannot know"
    found = survey.call(hot)
    assert found.distinct_share == pytest.approx(0.01, abs=0.002)
    run = torch.arange(10_000) % 5000
    survey.call(run)
    assert survey.call(run).run_rows == 5000


def test_nothing_is_awaited(survey: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    hot = torch.zeros(5000, dtype=torch.int64)
    monkeypatch.setattr(Event, "arrived", False)
    assert [survey.call(hot) for _ in range(40)] == [Look()] * 40
    monkeypatch.setattr(Event, "arrived", True)
    assert survey.call(hot).distinct_share < 0.01


def test_other_rows_and_other_batch_sizes_are_looked_at_apart(survey: Watched) -> None:
    hot = torch.zeros(5000, dtype=torch.int64)
    for _ in range(2):
        survey.call(hot)
    assert survey.call(hot[:4200]).distinct_share < 0.01
    assert survey.call(hot.repeat(4)) == Look()
    assert survey.call(hot, TABLE.view(2500, 1024)) == Look()
    assert survey.call(hot, TABLE[:4000]) == Look(), "a slice is another table"
    few = hot[: module.SURVEY_BYTES // 512 - 1]
    for _ in range(3):
        assert survey.call(few) == Look(), "too small to learn from"


def test_one_look_in_sixteen_and_old_tables_are_forgotten(
    survey: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    hot = torch.zeros(5000, dtype=torch.int64)
    for _ in range(33):
        survey.call(hot)
    assert survey.started == 3
    monkeypatch.setattr(module, "MAX_TABLES", 2)
    for width in (128, 256, 64):
        survey.call(hot.repeat(8), TABLE.view(-1, width))
    assert survey.call(hot) == Look(), "its last look is gone"


class Clock:
    """Time that only gathers move."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.arrived = True

    def timer(self) -> Any:
        clock = self

        class Timer:
            at_ms = -1.0

            def record(self) -> None:
                self.at_ms = clock.now_ms

            def query(self) -> bool:
                return clock.arrived

            def elapsed_time(self, end: Any) -> float:
                return float(end.at_ms - self.at_ms)

        return Timer()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def place(tmp_path: FilePath) -> Iterator[FilePath]:
    directory = tmp_path / "cache"
    directory.mkdir(mode=0o700)
    yield directory / "times.json"


def chooser_of(host_module: Any, trials: Trials) -> Chooser:
    engine = Engine(CPU, host_module, Staging(Clock), Tuning(num_sms=2))  # type: ignore[arg-type]
    return Chooser(engine, trials)


def run(chooser: Chooser, clock: Clock, request: Request, ms: dict[Path, float]) -> Any:
    """One gather on a machine where each path takes so many milliseconds."""
    taken = chooser.choose(request, Look(), Reach.PINNED, None)
    if not isinstance(taken, Trial):
        return taken
    with taken:
        clock.now_ms += ms[taken.path]
    return taken.path


SLOW_CPU = {Path.DIRECT: 9.0, Path.SORTED: 2.0, Path.CPU: 5.0, Path.DMA: 99.0}
LARGE = torch.empty(4_000_000_000, dtype=torch.uint8)  # never touched: no memory


def big_request(num: int = 300_000) -> Request:
    index = torch.zeros(num, dtype=torch.int64)
    out = torch.empty(num, 400, dtype=torch.uint8)
    return Request(table=LARGE.view(-1, 400)[:10_000_000], index=index, out=out)


@pytest.mark.parametrize("faster", [Path.SORTED, Path.CPU])
def test_the_path_that_was_fastest_here_is_taken(
    host_module: Any, clock: Clock, place: FilePath, faster: Path
) -> None:
    """Whatever a model recorded elsewhere foretells."""
    chooser = chooser_of(host_module, Trials(place, clock.timer))
    ms = SLOW_CPU | {faster: 1.0}
    request = big_request()
    first = [run(chooser, clock, request, ms) for _ in range(9)]
    assert set(first) >= {Path.SORTED, Path.CPU}, "both were tried"
    assert [run(chooser, clock, request, ms) for _ in range(5)] == [faster] * 5
    nearby = big_request(310_000)
    assert run(chooser, clock, nearby, ms) is faster, "of its kind"
    cell = chooser.cell(request, Look(), Reach.PINNED, None)
    times = chooser.trials.times(cell)
    assert times[faster] == pytest.approx(1e6 / 300_000)
    assert chooser.trials.settled(cell) is faster


def test_nothing_waits_for_a_trial(
    host_module: Any, clock: Clock, place: FilePath
) -> None:
    chooser = chooser_of(host_module, Trials(place, clock.timer))
    clock.arrived = False
    request = big_request()
    paths = [run(chooser, clock, request, SLOW_CPU) for _ in range(30)]
    assert len(set(paths)) > 1, "they take turns until times have arrived"
    cell = chooser.cell(request, Look(), Reach.PINNED, None)
    assert chooser.trials.settled(cell) is None and not chooser.trials.times(cell)
    clock.arrived = True
    assert run(chooser, clock, request, SLOW_CPU) is Path.SORTED


def test_small_gathers_and_plain_memory_need_no_trial(
    host_module: Any, clock: Clock, place: FilePath
) -> None:
    chooser = chooser_of(host_module, Trials(place, clock.timer))
    small = big_request(2000)
    assert chooser.choose(small, Look(), Reach.PINNED, None) is Path.DIRECT
    assert chooser.choose(big_request(), Look(), Reach.NONE, None) is Path.CPU
    assert not place.exists()


def test_budgets_and_repeats_have_times_of_their_own(
    host_module: Any, clock: Clock, place: FilePath
) -> None:
    chooser = chooser_of(host_module, Trials(place, clock.timer))
    request = big_request()
    plain = chooser.cell(request, Look(), Reach.PINNED, None)
    assert chooser.cell(request, Look(), Reach.PINNED, 4) != plain
    assert chooser.cell(request, Look(), Reach.MANAGED, None) != plain
    assert chooser.cell(request, Look(distinct_share=0.1), Reach.PINNED, None) != plain
    assert chooser.cell(request, Look(distinct_share=0.9), Reach.PINNED, None) == plain
    assert chooser.cell(request, Look(run_rows=64.0), Reach.PINNED, None) != plain
    assert chooser.cell(big_request(600_000), Look(), Reach.PINNED, None) != plain


def test_what_was_learnt_is_kept(
    host_module: Any, clock: Clock, place: FilePath
) -> None:
    request = big_request()
    chooser = chooser_of(host_module, Trials(place, clock.timer))
    while not place.exists():
        run(chooser, clock, request, SLOW_CPU)
    assert place.stat().st_mode & 0o777 == 0o600
    again = chooser_of(host_module, Trials(place, clock.timer))
    assert again.choose(request, Look(), Reach.PINNED, None) is Path.SORTED


@pytest.mark.parametrize(
    "text",
    [
        "{half a file",
        "[]",
        "[" * 100_000,
        '{"version": 0, "cells": {}}',
        '{"version": 1, "cells": {"a": 3}}',
        '{"version": 1, "cells": {"a": {"teleport": 3}}}',
        '{"version": 1, "cells": {"a": {"direct": -1}}}',
        '{"version": 1, "cells": {"a": {"direct": NaN}}}',
        b"\xff\xfe",
    ],
)
def test_a_damaged_file_is_measured_again(
    clock: Clock, place: FilePath, text: str | bytes
) -> None:
    place.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert Trials(place, clock.timer)._learnt == {}


def test_a_file_that_others_may_write_is_refused(clock: Clock, place: FilePath) -> None:
    place.write_text(json.dumps({"version": 1, "cells": {}}))
    place.chmod(0o666)
    with pytest.raises(CacheDirectoryError, match="written by other users"):
        Trials(place, clock.timer)


def test_a_near_tie_goes_to_direct_and_the_cpu_must_be_clearly_faster() -> None:
    known = CellTimes.known
    assert known({Path.DIRECT: 1.04, Path.SORTED: 1.0}).best is Path.DIRECT
    assert known({Path.DIRECT: 1.07, Path.SORTED: 1.0}).best is Path.SORTED
    assert known({Path.CPU: 0.95, Path.SORTED: 1.0}).best is Path.SORTED
    assert known({Path.CPU: 0.85, Path.SORTED: 1.0}).best is Path.CPU


def test_a_trial_that_failed_is_not_a_time(clock: Clock) -> None:
    times = CellTimes([Path.DIRECT, Path.CPU])
    for _ in range(6):
        trial = times.next(10, clock.timer)
        if trial.path is Path.CPU:
            with pytest.raises(RuntimeError), trial:
                raise RuntimeError("no such row")
        else:
            with trial:
                clock.now_ms += 1.0
    times.read()
    assert Path.CPU not in times.times() and times.best is None


@pytest.fixture
def pinned_engine(host_module: Any, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Over the kernels on the CPU; every table counts as pinned."""
    monkeypatch.setattr("pydirect.gather.front.reach", lambda table: Reach.PINNED)
    return Engine(CPU, host_module, Staging(Event), Tuning(num_sms=2))  # type: ignore[arg-type]


@pytest.fixture
def front(
    pinned_engine: Engine, survey: Survey, clock: Clock, place: FilePath
) -> Front:
    chooser = Chooser(pinned_engine, Trials(place, clock.timer))
    return Front(pinned_engine, chooser, survey)


def test_front_times_the_gathers_of_a_cell(front: Front, place: FilePath) -> None:
    """And every one of them is right, on whichever path."""
    table = torch.randint(0, 255, (5000, 512), dtype=torch.uint8)
    for _ in range(12):
        index = torch.randint(0, 5000, (3000,))
        request = request_of(index, table)
        front.gather(request, None, None)
        assert torch.equal(request.out, table[index])
    assert os.path.exists(place), "the cell is settled"


def test_a_bound_table_gives_what_indexing_gives_on_every_path(
    front: Front,
    pinned_engine: Engine,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before its shapes have settled, after, and when what is known grows old."""
    table = torch.randint(0, 255, (5000, 512), dtype=torch.uint8)
    bound = BoundTable(front, table)
    asked = []
    gather = front.gather
    monkeypatch.setattr(
        front, "gather", lambda *given: asked.append(given) or gather(*given)
    )
    for step in range(40):
        num = 3000 if step % 4 else 7
        dtype = torch.int32 if step % 3 else torch.int64
        index = torch.randint(-5000, 5000, (2 * num,), dtype=dtype)[::2]
        rows = bound.index_select(index, wraps=True)
        assert torch.equal(rows, table[index.long()])
    assert 5 < len(asked) < 30, "most calls of a settled shape ask nobody"
    empty = torch.zeros(0, dtype=torch.int64)
    assert bound.index_select(empty, wraps=True).shape == (0, 512)
    for _ in range(9):
        with pytest.raises(GatherIndexError, match="index -5001 at position 1 "):
            bound.index_select(torch.tensor([3, -5001]), wraps=True)
            pinned_engine.check()


def test_a_graph_that_is_captured_holds_kernels_alone(
    host_module: Any,
    survey: Watched,
    clock: Clock,
    place: FilePath,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pydirect.gather.front.reach", lambda table: Reach.PINNED)
    monkeypatch.setattr("pydirect.gather.front._capturing", lambda: True)
    monkeypatch.setattr(clock, "timer", lambda: pytest.fail("a trial was begun"))
    engine = Engine(CPU, host_module, Staging(Event), Tuning(num_sms=2))  # type: ignore[arg-type]
    front = Front(engine, Chooser(engine, Trials(place, clock.timer)), survey)
    table = torch.randint(0, 255, (5000, 512), dtype=torch.uint8)
    index = torch.randint(0, 5000, (6000,))
    before = process_counters().read().calls.get(Path.DIRECT, 0)
    request = request_of(index, table)
    front.gather(request, None, None)
    assert torch.equal(request.out, table[index])
    assert survey.started == 0
    assert process_counters().read().calls[Path.DIRECT] == before + 1
