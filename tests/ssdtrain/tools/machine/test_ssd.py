"""The SSD measurement: its figures, its bounds, and that nothing is left behind."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ssdtrain import rates
from ssdtrain.tools.machine import ssd
from ssdtrain.tools.machine.links import LinkKind
from ssdtrain.tools.machine.ssd import KIB, MIB, SsdBudget, accepts_direct, measure_ssd

SMALL = SsdBudget(
    max_bytes=24 * MIB,
    max_seconds=100.0,
    file_bytes=4 * MIB,
    block_bytes=(16 * KIB, 64 * KIB, 256 * KIB),
    depths=(1, 2),
)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every pwrite, also of those the module does not count itself."""
    counted: list[int] = []
    real = os.pwrite

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        counted.append(real(descriptor, data, offset))
        return counted[-1]

    monkeypatch.setattr(os, "pwrite", pwrite)
    return counted


def test_curves_by_depth_within_the_byte_budget(
    tmp_path: Path, written: list[int]
) -> None:
    result = measure_ssd(str(tmp_path), SMALL)
    found = {(link.kind, link.depth) for link in result.links}
    kinds = (LinkKind.SSD_WRITE, LinkKind.SSD_READ)
    assert found == {(kind, depth) for kind in kinds for depth in (1, 2)}
    for link in result.links:
        assert [s.size_bytes for s in link.samples] == sorted(SMALL.block_bytes)
        assert all(0 < s.seconds < 100 for s in link.samples)
    probe_of_direct_io = 4096
    assert sum(written) - probe_of_direct_io == result.bytes_written
    assert 4 * MIB < result.bytes_written <= SMALL.max_bytes
    assert not result.skipped_cells


def test_nothing_is_left_behind_even_when_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []

    def broken(descriptor: int, data: Any, offset: int) -> int:
        seen.append(os.listdir(tmp_path))
        return len(data) // 2 if len(seen) > 5 else len(data)

    monkeypatch.setattr(os, "pwrite", broken)
    with pytest.raises(OSError, match="short write"):
        measure_ssd(str(tmp_path), SMALL)
    assert seen and not any(seen), "the file never had a name"
    assert os.listdir(tmp_path) == []


def test_a_file_system_without_tmpfile_or_direct_io(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refusing(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no O_TMPFILE")
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refusing)
    assert accepts_direct(str(tmp_path)) is False
    result = measure_ssd(str(tmp_path), SMALL)
    assert {link.mode for link in result.links} == {"buffered"}
    assert os.listdir(tmp_path) == []


def test_the_time_budget_ends_it(tmp_path: Path, monkeypatch: Any) -> None:
    """On a clock by which every read takes 20 ms and nothing else takes time."""
    now = [0.0]
    real = os.preadv

    def slow(descriptor: int, buffers: Any, offset: int) -> int:
        now[0] += 0.02
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", slow)
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr(ssd, "time", clock)
    monkeypatch.setattr(rates, "time", clock)
    budget = SsdBudget(
        max_bytes=64 * MIB,
        max_seconds=0.5,
        file_bytes=2 * MIB,
        block_bytes=(4 * KIB, 16 * KIB, 64 * KIB),
        depths=(1,),
    )
    # A clock that stands still has no write time to fit.
    monkeypatch.setattr(os, "pwrite", ticking(now, os.pwrite))
    result = measure_ssd(str(tmp_path), budget)
    # Each of the three read cells may end the block it has begun, no more.
    assert 0.4 < result.seconds <= 0.5 + 3 * 0.02 + 0.01
    (reads,) = [link for link in result.links if link.kind is LinkKind.SSD_READ]
    assert [s.seconds for s in reads.samples] == pytest.approx([0.02] * 3)


def ticking(now: list[float], real: Any) -> Any:
    """`real`, after which the clock has moved by a nanosecond."""

    def tick(*arguments: Any) -> Any:
        now[0] += 1e-9
        return real(*arguments)

    return tick


def test_a_budget_too_small_says_what_to_raise(tmp_path: Path) -> None:
    budget = SsdBudget(max_bytes=128 * KIB, file_bytes=32 * KIB, depths=(1,))
    with pytest.raises(ValueError, match="raise it"):
        measure_ssd(str(tmp_path), budget)


@pytest.mark.parametrize(
    "fields",
    [{"block_bytes": (1000,)}, {"depths": (0,)}, {"max_bytes": 1}, {"max_seconds": 0}],
)
def test_impossible_budgets(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expects"):
        SsdBudget(**fields)


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        measure_ssd(str(tmp_path / "none"), SMALL)
