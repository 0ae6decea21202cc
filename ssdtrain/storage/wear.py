"""SSD endurance: a directory's disk, what is written to it, what is left.

[Note: Days in a file]
Budgets are per day and disk, runs are not: the bytes of all processes of a user are
added up in one small JSON file in the user's cache directory, under a file lock.
Each process adds what it wrote since its last visit, every `FLUSH_BYTES` and at
close; so the file may lag by that much for each process, and the budget with it.
"""

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ssdtrain.errors import DamagedFileError, StorageFullError
from ssdtrain.jsonfile import Natural, load_as, write_json
from ssdtrain.storage.base import ForwardingStorage, Slot, Storage
from ssdtrain.storage.directory import user_cache

logger = logging.getLogger(__name__)

FLUSH_BYTES = 1024**3
KEPT_DAYS = 60
DAYS_A_YEAR = 365.25
WARN_BELOW_YEARS = 3.0
"""Wu projects more than three years for all its systems (5.3.6)."""
WARN_ABOVE_USED = 0.8
SEQUENTIAL_GAIN = 2.5
"""Ratings assume JESD219's random writes, which cost 2.5 flash writes each; records
are large, aligned and freed together, and cost about one (Wu 5.3.6)."""
SMART_LOG_BYTES = 512
SMART_LOG_PAGE = 0x02
UNIT_BYTES = 512_000
"""NVMe counts data units of a thousand blocks of 512 bytes (NVMe base spec, SMART)."""
NVME_IOCTL_ADMIN_CMD = 0xC0484E41
GET_LOG_PAGE = 0x02
ALL_NAMESPACES = 0xFFFFFFFF


@dataclass(frozen=True, kw_only=True)
class Smart:
    """What an NVMe controller says about itself."""

    written_bytes: int
    """By hosts, over its life."""
    used_fraction: float
    """Of its rated endurance, as the vendor estimates it; may exceed 1."""


def disk_of(directory: str | Path, sys: Path = Path("/sys")) -> str:
    """Name of the whole disk that a directory is on, as in /sys/block.

    Partitions lead to their disk. A file system without one block device (network,
    btrfs over several, overlay) is named by its device number.
    """
    device = os.stat(directory).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    place = sys / "dev" / "block" / number
    if not place.exists():
        return number
    real = place.resolve()
    return real.parent.name if (real / "partition").exists() else real.name


def read_smart(disk: str, dev: Path = Path("/dev")) -> Smart | str:
    """Ask an NVMe controller for its health log; needs the right to (root). Returns why
    there is none."""
    if not disk.startswith("nvme"):
        return f"{disk} is not an NVMe disk"
    page = ctypes.create_string_buffer(SMART_LOG_BYTES)
    # struct nvme_admin_cmd of linux/nvme_ioctl.h. Word 10 has the length in 32-bit
    # words less one, above the number of the page.
    words = (SMART_LOG_BYTES // 4 - 1) << 16 | SMART_LOG_PAGE, *(0,) * 7
    address = ctypes.addressof(page)
    head = GET_LOG_PAGE, 0, 0, ALL_NAMESPACES, 0, 0, 0, address, 0, SMART_LOG_BYTES
    command = struct.pack("<BBHIIIQQII8I", *head, *words)
    try:
        fd = os.open(dev / disk, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        return f"{dev / disk}: {error.strerror}"
    try:
        fcntl.ioctl(fd, NVME_IOCTL_ADMIN_CMD, command)
    except OSError as error:
        return f"{disk} refuses its SMART log: {error.strerror}"
    finally:
        os.close(fd)
    log = page.raw  # percent used at byte 5, data units written at 48
    units = int.from_bytes(log[48:64], "little")
    return Smart(written_bytes=units * UNIT_BYTES, used_fraction=log[5] / 100)


def log_path() -> Path:
    """`wear.json` in the user's cache directory."""
    return user_cache() / "wear.json"


def today() -> str:
    """UTC date: one day for all machines of a job."""
    return time.strftime("%Y-%m-%d", time.gmtime())


class WearLog:
    """Bytes by disk and day, shared by all processes of the user.

    Args:
        path: the JSON file, made when first written; None: `log_path()`.
        day: names the present day.
    """

    def __init__(
        self, path: Path | None = None, day: Callable[[], str] = today
    ) -> None:
        self.path = path or log_path()
        self._day = day

    def add(self, disk: str, num_bytes: int) -> int:
        """Add to today's bytes of a disk; returns the day's sum over all processes."""
        day = self._day()
        with self._locked():
            disks = self._load()
            days = disks.setdefault(disk, {})
            days[day] = days.get(day, 0) + num_bytes
            for old in sorted(days)[:-KEPT_DAYS]:
                del days[old]
            write_json(self.path, disks)
            return days[day]

    def days(self, disk: str) -> dict[str, int]:
        """Return the bytes of each day on which the disk was written, oldest first."""
        if not self.path.exists():
            return {}
        with self._locked():
            return dict(sorted(self._load().get(disk, {}).items()))

    @property
    def day(self) -> str:
        """The present day."""
        return self._day()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        fd = os.open(self.path.with_suffix(".lock"), flags, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _load(self) -> dict[str, dict[str, int]]:
        try:
            kind = dict[str, dict[str, Natural]]
            found: dict[str, dict[str, int]] = load_as(kind, self.path, "a wear log")
            return found
        except FileNotFoundError:
            return {}
        except DamagedFileError as error:
            # Endurance is accounting: a damaged file must not stop training.
            aside = self.path.replace(self.path.with_suffix(".damaged"))
            logger.warning("%s; it is now %s and counting starts again", error, aside)
            return {}


@dataclass(frozen=True, kw_only=True)
class WearReport:
    """The state of one disk."""

    disk: str
    today_bytes: int
    """Written today by all of the user's runs, as far as they have reported."""
    bytes_per_day: float
    """Mean over the days with writes."""
    budget_bytes: int | None
    lifetime_years: float | None
    """Left at that rate; None without an endurance to go by."""
    source: str
    """Where the endurance comes from, or why there is none."""
    warnings: tuple[str, ...]


def lifetime_years(
    endurance_bytes: float, bytes_per_day: float, *, gain: float = SEQUENTIAL_GAIN
) -> float:
    """Years until the endurance is used up (Wu 5.3.6: S_endurance t / S_written).

    Args:
        endurance_bytes: writes that are left by the rating.
        bytes_per_day: 0 means it lasts for ever.
        gain: how much gentler these writes are than the rating's.
    """
    if bytes_per_day <= 0:
        return float("inf")
    return max(0.0, endurance_bytes) * gain / bytes_per_day / DAYS_A_YEAR


@dataclass(frozen=True, kw_only=True)
class Endurance:
    """What may be written to a disk, and where that is kept."""

    budget_bytes: int | None = None
    """A day; None: no limit."""
    rated_bytes: int | None = None
    """Lifetime writes by the data sheet; None: only SMART can tell."""
    log: WearLog | None = None
    """Shared with other processes; None: the user's own (`log_path`)."""


class MeteredStorage(ForwardingStorage):
    """Counts what is written to a disk and holds a daily budget.

    Once the budget is used up, `allocate` raises `StorageFullError`: tensors are kept
    in memory, counted, until the day changes (UTC).

    Args:
        inner: the storage on that disk.
        disk: its name (see `disk_of`).
        endurance: of the disk.
        smart: asks the disk.
    """

    def __init__(
        self,
        inner: Storage,
        disk: str,
        endurance: Endurance,
        smart: Callable[[str], Smart | str] = read_smart,
    ) -> None:
        super().__init__(inner)
        self._disk = disk
        self._log = endurance.log or WearLog()
        self._budget_bytes = endurance.budget_bytes
        self._rated_bytes = endurance.rated_bytes
        self._smart = smart
        self._lock = threading.Lock()
        self._unreported_bytes = 0
        self._promised: set[Slot] = set()  # allocated, not written yet
        self._day = self._log.day
        self._today_bytes = 0
        self._log_failed = False
        self._look()

    def allocate(self, num_bytes: int) -> Slot:
        """Allocate within the budget.

        Raises:
            StorageFullError: the storage is full, or today's budget is used up.
        """
        with self._lock:
            self._turn_day()
            promised = sum(slot.capacity_bytes for slot in self._promised)
            spent = self._today_bytes + self._unreported_bytes + promised
        if self._budget_bytes is not None and spent + num_bytes > self._budget_bytes:
            raise StorageFullError(
                errno.EDQUOT,
                f"write_budget of {self._budget_bytes} bytes a day is used up on "
                f"{self._disk} ({spent} bytes since midnight UTC); raise write_budget "
                "or wait for the next day",
            )
        slot = self.inner.allocate(num_bytes)
        with self._lock:
            self._promised.add(slot)
        return slot

    def write(self, slot: Slot, buffer: torch.Tensor) -> None:
        """Write and count; what fails is not counted."""
        self.inner.write(slot, buffer)
        with self._lock:
            self._promised.discard(slot)
            self._unreported_bytes += buffer.numel()
            due = self._unreported_bytes >= FLUSH_BYTES
        if due:
            self._flush()

    def free(self, slot: Slot) -> None:
        """Free; a slot that was never written has cost nothing."""
        with self._lock:
            self._promised.discard(slot)
        self.inner.free(slot)

    def close(self) -> None:
        """Report to the log and close."""
        self._flush()
        self.inner.close()

    def report(self) -> WearReport:
        """Return the disk's state; asks its SMART log."""
        self._flush()
        days = {} if self._log_failed else self._log.days(self._disk)
        rate = sum(days.values()) / len(days) if days else 0.0
        left, source, used = self._endurance(sum(days.values()))
        years = None if left is None else lifetime_years(left, rate)
        return WearReport(
            disk=self._disk,
            today_bytes=self._today_bytes,
            bytes_per_day=rate,
            budget_bytes=self._budget_bytes,
            lifetime_years=years,
            source=source,
            warnings=tuple(_warnings(self._disk, years, used)),
        )

    def _endurance(self, written_bytes: int) -> tuple[float | None, str, float | None]:
        """Return the bytes left by the rating, where that comes from, and the share
        used."""
        smart = self._smart(self._disk)
        if isinstance(smart, str):
            if self._rated_bytes is None:
                return None, f"{smart}; no rating configured", None
            left = float(self._rated_bytes - written_bytes)
            return left, "rating, less what this user's runs wrote", None
        if self._rated_bytes is not None:
            left = self._rated_bytes * (1 - smart.used_fraction)
            return left, "rating and SMART", smart.used_fraction
        if smart.used_fraction <= 0:
            reason = "SMART shows less than 1 % used; no rating configured"
            return None, reason, smart.used_fraction
        rated = smart.written_bytes / smart.used_fraction
        return rated - smart.written_bytes, "SMART alone", smart.used_fraction

    def _turn_day(self) -> None:
        if self._log.day != self._day:
            self._day, self._today_bytes = self._log.day, 0

    def _look(self) -> None:
        try:
            self._today_bytes = self._log.days(self._disk).get(self._day, 0)
        except OSError as error:
            self._log_fails(error)

    def _flush(self) -> None:
        with self._lock:
            self._turn_day()
            moved, self._unreported_bytes = self._unreported_bytes, 0
            if moved == 0:
                return
            try:
                self._today_bytes = self._log.add(self._disk, moved)
            except OSError as error:
                # The bytes are written: accounting must not make that a failure.
                self._today_bytes += moved
                self._log_fails(error)

    def _log_fails(self, error: OSError) -> None:
        if not self._log_failed:
            logger.warning(
                "ssdtrain: the wear log cannot be kept (%s); this run counts for "
                "itself alone",
                error,
            )
        self._log_failed = True


def _warnings(disk: str, years: float | None, used: float | None) -> Iterator[str]:
    if years is not None and years < WARN_BELOW_YEARS:
        yield (
            f"{disk} lasts {years:.1f} years at this rate (less than "
            f"{WARN_BELOW_YEARS:g}); set write_budget, or offload less"
        )
    if used is not None and used >= WARN_ABOVE_USED:
        yield f"{disk} has used {used:.0%} of its rated endurance"
