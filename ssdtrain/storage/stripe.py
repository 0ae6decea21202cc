"""One storage over several, each at its own speed; a member that fails leaves.

[Note: A member leaves]
A record lies whole on one member, so a failure touches only that member's records.
A write that fails is repeated on another member while the caller still holds the
bytes: nothing is lost and the step goes on. The failed member gets no further
records. What it holds already stays where it is and is read from there, which a disk
that turned read-only still allows; a read that fails is the caller's
`ActivationLostError`, as on a single disk. (tests/ssdtrain/storage/test_stripe.py)
"""

import errno
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ssdtrain.counters import Fallback
from ssdtrain.errors import StorageFullError
from ssdtrain.rates import Clock
from ssdtrain.storage.base import Slot, Storage, StorageStats
from ssdtrain.storage.measure import Speedometer

logger = logging.getLogger(__name__)

FILES_A_MEMBER = 1024
"""Stripe file number = member number * this + the member's own file number."""


class _Place(NamedTuple):
    member: int
    slot: Slot


@dataclass(frozen=True, kw_only=True)
class MemberReport:
    """One member in numbers."""

    name: str
    used_bytes: int
    written_bytes: int
    round_trip_gb_per_s: float
    """Bytes over the time to write and read them once, as measured."""
    lost: str | None
    """Why it left the stripe; None while it is in."""


class StripeStorage:
    """A `Storage` over members of uneven speed.

    A slot goes to the member that would be done first with all it holds: shares of
    the bytes follow the measured speeds, so that all members end together.

    Args:
        members: closed with this storage. All have the same alignment.
        speeds: round-trip GB/s of each (`measure.round_trip_gb_per_s`); None: equal
            until transfers have shown otherwise.
        on_fallback: told `Fallback.STRIPE_MEMBER_LOST` when a member leaves.
        clock: times the transfers.

    Raises:
        ValueError: no member, or alignments differ.
    """

    def __init__(
        self,
        members: Sequence[Storage],
        *,
        speeds: Sequence[float] | None = None,
        on_fallback: Callable[[Fallback], None] = lambda _: None,
        clock: Clock = time.monotonic,
    ) -> None:
        alignments = {member.alignment_bytes for member in members}
        if len(alignments) != 1:
            raise ValueError(
                "a stripe expects members of one alignment, got "
                f"{sorted(alignments) or 'no member'}"
            )
        first = [1.0] * len(members) if speeds is None else list(speeds)
        if len(first) != len(members) or min(first) <= 0:
            raise ValueError(f"expected a speed above 0 for each member, got {first}")
        self._members = tuple(members)
        self._speed = tuple(Speedometer(gb_per_s, clock) for gb_per_s in first)
        self._on_fallback = on_fallback
        self._lock = threading.Lock()
        self._used_bytes = [0] * len(members)
        self._lost: dict[int, str] = {}
        self._moved: dict[Slot, _Place] = {}

    @property
    def alignment_bytes(self) -> int:
        """That of all members."""
        return self._members[0].alignment_bytes

    @property
    def members(self) -> tuple[Storage, ...]:
        """As given, lost ones too."""
        return self._members

    def describe(self) -> str:
        """`stripe of` all members."""
        return f"stripe of [{'; '.join(m.describe() for m in self._members)}]"

    def report(self) -> list[MemberReport]:
        """Return every member, lost ones too."""
        reports = []
        for number, member in enumerate(self._members):
            stats = member.stats()
            reports.append(
                MemberReport(
                    name=member.describe(),
                    used_bytes=stats.used_bytes,
                    written_bytes=stats.written_bytes,
                    round_trip_gb_per_s=self._speed[number].round_trip_gb_per_s,
                    lost=self._lost.get(number),
                )
            )
        return reports

    def allocate(self, num_bytes: int) -> Slot:
        """Reserve a slot on the member that would be done first.

        Raises:
            StorageFullError: no member has room.
        """
        place = self._allocate(num_bytes, set())
        inner = place.slot
        return inner._replace(file=place.member * FILES_A_MEMBER + inner.file)

    def write(self, slot: Slot, buffer: torch.Tensor) -> None:
        """Write to the slot's member, or to another one if that fails.

        Raises:
            StorageFullError: no member has room.
            OSError: every member failed; the caller still owns the bytes.
        """
        place = self._place_of(slot)
        tried: set[int] = set()
        while True:
            try:
                with self._speed[place.member].writing(buffer.numel()):
                    self._members[place.member].write(place.slot, buffer)
                return
            except OSError as error:
                tried.add(place.member)
                if not isinstance(error, StorageFullError):
                    self._leave(place.member, error)
                place = self._move(slot, tried, error)

    def read(self, slot: Slot, buffer: torch.Tensor) -> None:
        """Read from wherever the slot's bytes were written."""
        place = self._place_of(slot)
        with self._speed[place.member].reading(buffer.numel()):
            self._members[place.member].read(place.slot, buffer)

    def free(self, slot: Slot) -> None:
        """Give the slot back, and the place that its bytes had moved to."""
        with self._lock:
            moved = self._moved.pop(slot, None)
        for place in (self._home_of(slot), *([moved] if moved else [])):
            self._members[place.member].free(place.slot)
            with self._lock:
                self._used_bytes[place.member] -= place.slot.capacity_bytes

    def stats(self) -> StorageStats:
        """Sums over all members."""
        parts = [member.stats() for member in self._members]
        return StorageStats(
            used_bytes=sum(p.used_bytes for p in parts),
            allocated_bytes=sum(p.allocated_bytes for p in parts),
            written_bytes=sum(p.written_bytes for p in parts),
            read_bytes=sum(p.read_bytes for p in parts),
        )

    def close(self) -> None:
        """Close all members, also if one of them fails to."""
        failures = []
        for member in self._members:
            try:
                member.close()
            except OSError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def _home_of(self, slot: Slot) -> _Place:
        member, file = divmod(slot.file, FILES_A_MEMBER)
        return _Place(member, slot._replace(file=file))

    def _place_of(self, slot: Slot) -> _Place:
        with self._lock:
            return self._moved.get(slot) or self._home_of(slot)

    def _allocate(self, num_bytes: int, without: set[int]) -> _Place:
        why: OSError | None = None
        for member in self._in_order(num_bytes, without):
            try:
                slot = self._members[member].allocate(num_bytes)
            except StorageFullError as error:
                why = error
                continue
            with self._lock:
                self._used_bytes[member] += slot.capacity_bytes
            return _Place(member, slot)
        raise StorageFullError(
            errno.ENOSPC, f"no member has room for {num_bytes} bytes: {self.describe()}"
        ) from why

    def _in_order(self, num_bytes: int, without: set[int]) -> list[int]:
        """Members that may take the bytes, the one that is done first before others."""
        with self._lock:
            done_at = {
                number: (self._used_bytes[number] + num_bytes)
                / self._speed[number].round_trip_gb_per_s
                for number in range(len(self._members))
                if number not in self._lost and number not in without
            }
        return sorted(done_at, key=lambda number: (done_at[number], number))

    def _move(self, slot: Slot, tried: set[int], error: OSError) -> _Place:
        """A new place for bytes whose write failed; the old one stays reserved, for
        its address is the slot's name until it is freed."""
        try:
            place = self._allocate(slot.capacity_bytes, tried)
        except StorageFullError as full:
            if isinstance(error, StorageFullError):
                raise full from error
            raise error from full
        with self._lock:
            before = self._moved.get(slot)
            self._moved[slot] = place
        if before is not None:
            self._members[before.member].free(before.slot)
            with self._lock:
                self._used_bytes[before.member] -= before.slot.capacity_bytes
        return place

    def _leave(self, number: int, error: OSError) -> None:
        with self._lock:
            if number in self._lost:
                return
            self._lost[number] = str(error)
            left = len(self._members) - len(self._lost)
        self._on_fallback(Fallback.STRIPE_MEMBER_LOST)
        logger.warning(
            "ssdtrain: %s failed and leaves the stripe (%d left): %s",
            self._members[number].describe(),
            left,
            error,
        )
