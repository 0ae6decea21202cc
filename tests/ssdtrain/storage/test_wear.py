"""Wear: bytes a day and disk, the budget, SMART, the projected lifetime."""

import ctypes
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ssdtrain.errors import StorageFullError
from ssdtrain.storage import Storage, wear
from ssdtrain.storage.open import open_storage
from ssdtrain.storage.wear import (
    Endurance,
    MeteredStorage,
    Smart,
    WearLog,
    disk_of,
    lifetime_years,
    read_smart,
)
from tests.ssdtrain.faulty import Fault, FaultKind, FaultyStorage, Operation
from tests.ssdtrain.forking import OK, ended, started
from tests.ssdtrain.memory_storage import MemoryStorage

PAGE = 4096
TB = 10**12
Aligned = Callable[..., torch.Tensor]


class Clock:
    def __init__(self) -> None:
        self.day = "2026-01-01"

    def __call__(self) -> str:
        return self.day


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def wear_log(tmp_path: Path, clock: Clock) -> WearLog:
    return WearLog(tmp_path / "cache" / "wear.json", clock)


def no_smart(name: str) -> str:
    return f"{name} has none"


def smart(written_bytes: int, used_fraction: float) -> Callable[[str], Smart]:
    reading = Smart(written_bytes=written_bytes, used_fraction=used_fraction)
    return lambda _: reading


def metered(
    inner: Storage,
    disk: str,
    smart: Callable[[str], Smart | str] = read_smart,
    **endurance: Any,
) -> MeteredStorage:
    return MeteredStorage(inner, disk, Endurance(**endurance), smart)


def write(storage: MeteredStorage, aligned: Aligned, pages: int) -> None:
    slot = storage.allocate(pages * PAGE)
    storage.write(slot, aligned(pages * PAGE))
    storage.free(slot)


def test_the_seeds_arithmetic() -> None:
    """Four 12.8 TB drives at 3 writes a day for 5 years; 0.4 TB each 60 s step."""
    endurance = 4 * 12.8 * TB * 3 * 365.25 * 5
    a_day = 0.4 * TB * 86_400 / 60
    assert lifetime_years(endurance, a_day, gain=1.0) == pytest.approx(1.3333, abs=1e-3)
    assert lifetime_years(endurance, a_day) == pytest.approx(2.5 * 1.3333, abs=3e-3)
    assert lifetime_years(endurance, 0) == float("inf")
    assert lifetime_years(-1, 1) == 0


def test_bytes_by_disk_and_day(
    wear_log: WearLog, clock: Clock, aligned: Aligned
) -> None:
    for day, pages in (("2026-01-01", 3), ("2026-01-02", 5)):
        clock.day = day
        for name in ("nvme0n1", "nvme1n1"):
            storage = metered(MemoryStorage(), name, log=wear_log)
            write(storage, aligned, pages)
            storage.close()
    expected = {"2026-01-01": 3 * PAGE, "2026-01-02": 5 * PAGE}
    assert wear_log.days("nvme0n1") == wear_log.days("nvme1n1") == expected
    assert wear_log.days("sda") == {}


def test_processes_add_up(tmp_path: Path) -> None:
    path = tmp_path / "wear.json"

    def child() -> int:
        for _ in range(20):
            WearLog(path).add("nvme0n1", 7)
        return OK

    children = [started(child) for _ in range(2)]
    assert [ended(each) for each in children] == [OK, OK]
    assert sum(WearLog(path).days("nvme0n1").values()) == 2 * 20 * 7
    assert oct(path.with_suffix(".lock").stat().st_mode & 0o777) == "0o600"


def test_budget(wear_log: WearLog, clock: Clock, aligned: Aligned) -> None:
    storage = metered(MemoryStorage(), "nvme0n1", log=wear_log, budget_bytes=10 * PAGE)
    write(storage, aligned, 6)
    with pytest.raises(StorageFullError, match="write_budget of 40960 bytes a day"):
        storage.allocate(5 * PAGE)
    # Slots that are waiting to be written count as well; freed ones no longer.
    waiting = storage.allocate(4 * PAGE)
    with pytest.raises(StorageFullError):
        storage.allocate(PAGE)
    storage.free(waiting)
    write(storage, aligned, 4)
    storage.close()
    # Another process on the same day finds the budget spent; the next day is new.
    again = metered(MemoryStorage(), "nvme0n1", log=wear_log, budget_bytes=10 * PAGE)
    with pytest.raises(StorageFullError, match="since midnight UTC"):
        again.allocate(PAGE)
    clock.day = "2026-01-02"
    write(again, aligned, 10)
    again.close()


def test_failed_writes_are_not_counted(wear_log: WearLog, aligned: Aligned) -> None:
    fault = Fault(operation=Operation.WRITE, kind=FaultKind.IO_ERROR, at=0)
    inner = FaultyStorage(MemoryStorage(), [fault])
    storage = metered(inner, "nvme0n1", log=wear_log)
    slot = storage.allocate(PAGE)
    with pytest.raises(OSError):
        storage.write(slot, aligned(PAGE))
    storage.close()
    assert wear_log.days("nvme0n1") == {}


def test_lifetime_by_rating(wear_log: WearLog, clock: Clock) -> None:
    for day in ("2025-12-30", "2025-12-31"):
        clock.day = day
        wear_log.add("nvme0n1", 10 * TB)
    storage = metered(
        MemoryStorage(), "nvme0n1", log=wear_log, rated_bytes=1020 * TB, smart=no_smart
    )
    report = storage.report()
    assert report.bytes_per_day == pytest.approx(10 * TB)
    assert report.lifetime_years == pytest.approx(1000 * 2.5 / 10 / 365.25)
    assert report.lifetime_years < 3
    assert "lasts 0.7 years" in report.warnings[0]
    assert report.source == "rating, less what this user's runs wrote"


@pytest.mark.parametrize(
    ("rated", "reading", "left", "source"),
    [
        (1000 * TB, smart(200 * TB, 0.25), 750 * TB, "rating and SMART"),
        (None, smart(200 * TB, 0.25), 600 * TB, "SMART alone"),
        (None, smart(5 * TB, 0.0), None, "less than 1 % used"),
        (None, no_smart, None, "no rating configured"),
    ],
)
def test_endurance_sources(
    wear_log: WearLog,
    rated: int | None,
    reading: Callable[[str], Smart | str],
    left: int | None,
    source: str,
) -> None:
    wear_log.add("nvme0n1", TB)
    storage = metered(
        MemoryStorage(), "nvme0n1", log=wear_log, rated_bytes=rated, smart=reading
    )
    report = storage.report()
    assert source in report.source
    if left is None:
        assert report.lifetime_years is None
    else:
        assert report.lifetime_years == pytest.approx(left * 2.5 / TB / 365.25)


def test_a_worn_disk_is_named(wear_log: WearLog) -> None:
    storage = metered(
        MemoryStorage(), "nvme0n1", log=wear_log, smart=smart(900 * TB, 0.9)
    )
    assert "nvme0n1 has used 90% of its rated endurance" in storage.report().warnings


def test_old_days_leave(wear_log: WearLog, clock: Clock) -> None:
    for number in range(wear.KEPT_DAYS + 20):
        clock.day = f"2026-{1 + number // 28:02}-{1 + number % 28:02}"
        wear_log.add("nvme0n1", 1)
    days = wear_log.days("nvme0n1")
    assert len(days) == wear.KEPT_DAYS
    assert list(days)[-1] == clock.day


@pytest.mark.parametrize("text", ["{", "[1]", '{"nvme0n1": 3}'])
def test_a_damaged_log_is_put_aside(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "wear.json"
    path.write_text(text)
    assert WearLog(path).add("nvme0n1", 5) == 5
    assert path.with_suffix(".damaged").read_text() == text
    assert "counting starts again" in caplog.text


def test_without_a_log_writes_go_on(
    tmp_path: Path, aligned: Aligned, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    storage = metered(
        MemoryStorage(),
        "nvme0n1",
        log=WearLog(tmp_path / "file" / "wear.json"),
        budget_bytes=3 * PAGE,
        smart=no_smart,
    )
    write(storage, aligned, 2)
    assert storage.report().today_bytes == 2 * PAGE
    with pytest.raises(StorageFullError):  # the budget still holds, for this run
        storage.allocate(2 * PAGE)
    assert caplog.text.count("wear log cannot be kept") == 1


def test_smart_asks_the_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvme0n1").write_bytes(b"")

    def answer(fd: int, request: int, command: bytes) -> int:
        assert request == 0xC0484E41 and len(command) == 72
        opcode, namespace, address, num_bytes, word10 = (
            int.from_bytes(command[at : at + size], "little")
            for at, size in ((0, 1), (4, 4), (24, 8), (36, 4), (40, 4))
        )
        assert opcode == 0x02 and namespace == 0xFFFFFFFF
        assert word10 == 0x007F0002  # 128 words, page 2
        page = bytearray(num_bytes)
        page[5], page[48] = 7, 9
        ctypes.memmove(address, bytes(page), len(page))
        return 0

    monkeypatch.setattr(wear.fcntl, "ioctl", answer)
    reading = read_smart("nvme0n1", tmp_path)
    assert reading == Smart(written_bytes=9 * 512_000, used_fraction=0.07)


def test_smart_reasons(tmp_path: Path) -> None:
    assert read_smart("sda") == "sda is not an NVMe disk"
    assert "No such file" in str(read_smart("nvme9n1", tmp_path))
    (tmp_path / "nvme9n1").write_bytes(b"")
    assert "refuses its SMART log" in str(read_smart("nvme9n1", tmp_path))


def test_partitions_lead_to_their_disk(tmp_path: Path) -> None:
    device = os.stat(tmp_path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    assert disk_of(tmp_path, tmp_path / "sys") == number
    partition = tmp_path / "sys" / "devices" / "nvme3n1" / "nvme3n1p2"
    partition.mkdir(parents=True)
    (tmp_path / "sys" / "dev" / "block").mkdir(parents=True)
    link = tmp_path / "sys" / "dev" / "block" / number
    link.symlink_to(partition)
    assert disk_of(tmp_path, tmp_path / "sys") == "nvme3n1p2"
    (partition / "partition").write_text("2")
    assert disk_of(tmp_path, tmp_path / "sys") == "nvme3n1"


def test_open_storage_meters(
    directory: Path, wear_log: WearLog, aligned: Aligned
) -> None:
    endurance = Endurance(budget_bytes=8 * PAGE, log=wear_log)
    storage = open_storage([directory], endurance=endurance)
    assert isinstance(storage, MeteredStorage)
    write(storage, aligned, 3)
    storage.close()
    assert wear_log.days(disk_of(directory)) == {"2026-01-01": 3 * PAGE}
    raw = json.loads((wear_log.path).read_text())
    assert list(raw) == [disk_of(directory)]
