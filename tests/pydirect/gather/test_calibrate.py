"""Rates are measured once a table size is worth it, and cached on disk."""

import dataclasses
from collections.abc import Callable
from pathlib import Path as FilePath
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pydirect.gather import calibrate, chooser
from pydirect.gather.chooser import Look
from pydirect.gather.cpu import Staging
from pydirect.gather.engine import Engine, Tuning
from pydirect.gather.request import Path, Request
from pydirect.memory import Reach

CPU = torch.device("cpu")


class Marker:
    """A copy on the CPU is done when it returns."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...


@pytest.fixture
def engine(
    host_module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: FilePath
) -> Engine:
    """Kernels run on the CPU, and a measurement takes milliseconds."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    properties = SimpleNamespace(name="a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for name, value in (
        ("_SMALLEST_BYTES", 1 << 16),
        ("_OUT_BYTES", 1 << 14),
        ("_NUM_LINES", (1 << 14) // 128),
        ("_NUM_LONG", (1 << 14) // 4096),
    ):
        monkeypatch.setattr(calibrate, name, value)
    return Engine(CPU, host_module, Staging(Marker), Tuning(num_sms=2))


def request_of(num: int, row_bytes: int, num_rows: int = 1024) -> Request:
    return Request(
        table=torch.zeros(num_rows, row_bytes, dtype=torch.uint8),
        index=torch.zeros(num, dtype=torch.int64),
        out=torch.zeros(num, row_bytes, dtype=torch.uint8),
    )


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many measurements there have been."""
    seen = []
    stock = calibrate.measure

    def measure(*args: Any) -> Any:
        seen.append(args)
        return stock(*args)

    monkeypatch.setattr(calibrate, "measure", measure)
    return lambda: len(seen)


def test_all_rates_are_measured(engine: Engine) -> None:
    rates = calibrate.measure(engine, torch.zeros(4096, 128, dtype=torch.uint8))
    for field in dataclasses.fields(rates):
        value = getattr(rates, field.name)
        numbers = dict(value).values() if field.name == "page_ns" else [value]
        assert all(0 <= number < 1e9 for number in numbers), field.name
    assert rates.link_gbps > 0 and rates.dma_gbps > 0 and rates.page_ns


def test_measured_once_and_read_from_disk(
    engine: Engine, count: Callable[[], int]
) -> None:
    large = request_of(5000, 1024)
    first = chooser.Chooser(engine)
    path = first.choose(large, Look(), Reach.PINNED)
    assert count() == 1 and path in Path
    assert first.choose(large, Look(), Reach.PINNED) is path
    again = chooser.Chooser(engine)
    assert again.choose(large, Look(), Reach.PINNED) is path
    assert again.known() == first.known() and count() == 1
    (file,) = (FilePath(calibrate.cache_directory())).glob("rates-*.json")
    file.write_text("{half a file")
    chooser.Chooser(engine).choose(large, Look(), Reach.PINNED)
    assert count() == 2, "a damaged file is measured again"


def test_small_gathers_do_not_start_a_measurement(
    engine: Engine, count: Callable[[], int]
) -> None:
    mine = chooser.Chooser(engine)
    small, large = request_of(10, 1024), request_of(5000, 1024)
    assert mine.choose(small, Look(), Reach.PINNED) is Path.DIRECT
    assert count() == 0 and mine.known() == {}
    mine.choose(large, Look(), Reach.PINNED)
    assert count() == 1
    mine.choose(small, Look(), Reach.PINNED)
    assert count() == 1
    assert mine.choose(large, Look(), Reach.NONE) is Path.CPU
