"""What a gather learns of its indices, and when it looks."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pydirect.gather import chooser as module
from pydirect.gather.chooser import Look, Survey

CPU = torch.device("cpu")
TABLE = torch.zeros(5000, 512, dtype=torch.uint8)


class Event:
    """A copy on the CPU has arrived when it was made."""

    arrived = True

    def record(self, stream: object) -> None: ...

    def query(self) -> bool:
        return Event.arrived


@pytest.fixture
def survey(host_module: Any, monkeypatch: pytest.MonkeyPatch) -> Survey:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    stream = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(Event, "arrived", True)
    return Survey(host_module, CPU)


def test_repeats_and_runs_are_found_a_call_later(survey: Survey) -> None:
    hot = torch.randint(0, 50, (5000,))
    assert survey.look(TABLE, hot) == Look(), "the first call cannot know"
    found = survey.look(TABLE, hot)
    assert found.distinct_share == pytest.approx(0.01, abs=0.002)
    run = torch.arange(10_000) % 5000
    survey.look(TABLE, run)
    assert survey.look(TABLE, run).run_rows == 5000


def test_nothing_is_awaited(survey: Survey, monkeypatch: pytest.MonkeyPatch) -> None:
    hot = torch.zeros(5000, dtype=torch.int64)
    monkeypatch.setattr(Event, "arrived", False)
    assert [survey.look(TABLE, hot) for _ in range(40)] == [Look()] * 40
    monkeypatch.setattr(Event, "arrived", True)
    assert survey.look(TABLE, hot).distinct_share < 0.01


def test_other_rows_and_other_batch_sizes_are_looked_at_apart(survey: Survey) -> None:
    hot = torch.zeros(5000, dtype=torch.int64)
    for _ in range(2):
        survey.look(TABLE, hot)
    assert survey.look(TABLE, hot[:4200]).distinct_share < 0.01
    assert survey.look(TABLE, hot.repeat(4)) == Look()
    assert survey.look(TABLE.view(2500, 1024), hot) == Look()
    assert survey.look(TABLE[:4000], hot) == Look(), "a slice is another table"
    few = hot[: module._SURVEY_BYTES // 512 - 1]
    for _ in range(3):
        assert survey.look(TABLE, few) == Look(), "too small to learn from"


def test_one_look_in_sixteen_and_old_tables_are_forgotten(
    survey: Survey, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    stock = survey._start
    monkeypatch.setattr(survey, "_start", lambda i: started.append(1) or stock(i))
    hot = torch.zeros(5000, dtype=torch.int64)
    for _ in range(33):
        survey.look(TABLE, hot)
    assert len(started) == 3
    monkeypatch.setattr(module, "_TABLES", 2)
    for width in (128, 256, 64):
        survey.look(TABLE.view(-1, width), hot.repeat(8))
    assert survey.look(TABLE, hot) == Look(), "its last look is gone"
