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
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch

from ssdtrain.counters import Fallback
from ssdtrain.errors import StorageFullError
from ssdtrain.rates import RateMeter, round_trip
from ssdtrain.storage.base import Slot, Storage, StorageStats

logger = logging.getLogger(__name__)


class Member:
    """A storage of a stripe: its speed, its bytes, and whether it is still in."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.used_bytes = 0
        """In slots that the stripe has taken."""
        self.why_lost = ""
        """Why it left the stripe; "" while it is in."""
        self.writes, self.reads = RateMeter(), RateMeter()

    def done_at(self, num_bytes: int) -> float:
        """When it would be done with all it holds and so many bytes more."""
        speed = round_trip(self.writes.gb_per_s, self.reads.gb_per_s)
        return (self.used_bytes + num_bytes) / speed


class _Place(NamedTuple):
    member: Member
    slot: Slot
    """As the member knows it."""


class StripeStorage:
    """A `Storage` over members of uneven speed.

    A slot goes to the member that would be done first with all it holds: shares of
    the bytes follow the speeds, so that all members end together. Transfers tell the
    speeds; until they have, all are taken for equal.

    Args:
        members: closed with this storage, of one file and the same alignment each.
        on_fallback: told `Fallback.STRIPE_MEMBER_LOST` when a member leaves.

    Raises:
        ValueError: no member, or alignments differ.
    """

    def __init__(
        self,
        members: Sequence[Storage],
        *,
        on_fallback: Callable[[Fallback], None] = lambda _: None,
    ) -> None:
        alignments = {member.alignment_bytes for member in members}
        if len(alignments) != 1:
            raise ValueError(
                "a stripe expects members of one alignment, got "
                f"{sorted(alignments) or 'no member'}"
            )
        self.members = tuple(map(Member, members))
        """As given, lost ones too; a slot's file is its number here."""
        self._on_fallback = on_fallback
        self._lock = threading.Lock()
        self._moved: dict[Slot, _Place] = {}

    @property
    def alignment_bytes(self) -> int:
        """That of all members."""
        return self.members[0].storage.alignment_bytes

    def describe(self) -> str:
        """`stripe of` all members."""
        names = "; ".join(member.storage.describe() for member in self.members)
        return f"stripe of [{names}]"

    def allocate(self, num_bytes: int) -> Slot:
        """Reserve a slot on the member that would be done first.

        Raises:
            StorageFullError: no member has room.
        """
        member, slot = self._allocate(num_bytes)
        return slot._replace(file=self.members.index(member))

    def write(self, slot: Slot, buffer: torch.Tensor) -> None:
        """Write to the slot's member, or to another one if that fails.

        Raises:
            StorageFullError: no member has room.
            OSError: every member failed; the caller still owns the bytes.
        """
        place = self._place_of(slot)
        tried: list[Member] = []
        while True:
            member = place.member
            try:
                with member.writes.transfer(buffer.numel()):
                    member.storage.write(place.slot, buffer)
                return
            except OSError as error:
                tried.append(member)
                if not isinstance(error, StorageFullError):
                    self._leave(member, error)
                place = self._move(slot, tried, error)

    def read(self, slot: Slot, buffer: torch.Tensor) -> None:
        """Read from wherever the slot's bytes were written."""
        member, inner = self._place_of(slot)
        with member.reads.transfer(buffer.numel()):
            member.storage.read(inner, buffer)

    def free(self, slot: Slot) -> None:
        """Give the slot back, and the place that its bytes had moved to."""
        with self._lock:
            moved = self._moved.pop(slot, None)
        self._free(self._home_of(slot))
        if moved is not None:
            self._free(moved)

    def stats(self) -> StorageStats:
        """Sums over all members."""
        parts = [member.storage.stats() for member in self.members]
        return StorageStats(*map(sum, zip(*parts, strict=True)))

    def close(self) -> None:
        """Close all members, also if one of them fails to."""
        failures = []
        for member in self.members:
            try:
                member.storage.close()
            except OSError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def _home_of(self, slot: Slot) -> _Place:
        return _Place(self.members[slot.file], slot._replace(file=0))

    def _place_of(self, slot: Slot) -> _Place:
        with self._lock:
            return self._moved.get(slot) or self._home_of(slot)

    def _allocate(self, num_bytes: int, without: Collection[Member] = ()) -> _Place:
        with self._lock:
            left = [m for m in self.members if not (m.why_lost or m in without)]
            left.sort(key=lambda member: member.done_at(num_bytes))
        why: OSError | None = None
        for member in left:
            try:
                slot = member.storage.allocate(num_bytes)
            except StorageFullError as error:
                why = error
                continue
            with self._lock:
                member.used_bytes += slot.capacity_bytes
            return _Place(member, slot)
        raise StorageFullError(
            errno.ENOSPC, f"no member has room for {num_bytes} bytes: {self.describe()}"
        ) from why

    def _free(self, place: _Place) -> None:
        place.member.storage.free(place.slot)
        with self._lock:
            place.member.used_bytes -= place.slot.capacity_bytes

    def _move(self, slot: Slot, tried: Collection[Member], error: OSError) -> _Place:
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
            self._free(before)
        return place

    def _leave(self, member: Member, error: OSError) -> None:
        with self._lock:
            if member.why_lost:
                return
            member.why_lost = str(error) or repr(error)
            num_left = sum(not member.why_lost for member in self.members)
        self._on_fallback(Fallback.STRIPE_MEMBER_LOST)
        logger.warning(
            "ssdtrain: %s failed and leaves the stripe (%d left): %s",
            member.storage.describe(),
            num_left,
            error,
        )
