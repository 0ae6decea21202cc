"""Which bytes of a file are free: best fit, neighbours joined at once.

Pure bookkeeping: it never touches the file. Its owner holds the lock and extends the
file (see `posix.PosixStorage`).
"""

from bisect import bisect_left, insort

from ssdtrain.storage.base import Slot

ALIGNMENT_BYTES = 4096
"""Direct I/O and page size: slots start and end on it."""


def round_up(num_bytes: int, alignment_bytes: int = ALIGNMENT_BYTES) -> int:
    """Return the least multiple of `alignment_bytes` that holds `num_bytes`."""
    return -(-num_bytes // alignment_bytes) * alignment_bytes


class SlotTable:
    """The slots of one file. Not thread-safe.

    Best fit, lowest offset first among equals, leaves large blocks whole for large
    records. Neighbours are joined as soon as they are both free, so a file whose slots
    are all free is one block again: the next step takes the same places.
    """

    def __init__(self) -> None:
        self.end_bytes = 0
        """Length of the file."""
        self.used_bytes = 0
        """In slots that are taken."""
        self._taken: dict[int, int] = {}  # offset -> capacity
        self._by_size: list[tuple[int, int]] = []  # free: (size, start), sorted
        self._size_at: dict[int, int] = {}  # free: start -> size
        self._start_at: dict[int, int] = {}  # free: end -> start

    @property
    def num_free_blocks(self) -> int:
        """Separate free blocks; 1 when everything is free."""
        return len(self._by_size)

    def extend(self, num_bytes: int) -> None:
        """The file became `num_bytes` longer."""
        start = self.end_bytes
        self.end_bytes += num_bytes
        self._make_free(start, num_bytes)

    def missing_bytes(self, num_bytes: int) -> int:
        """Return how far the file must grow so that `num_bytes` fit at its end."""
        tail_start = self._start_at.get(self.end_bytes, self.end_bytes)
        return max(0, num_bytes - (self.end_bytes - tail_start))

    def take(self, capacity_bytes: int) -> Slot | None:
        """A slot of this capacity; None when no free block is large enough."""
        at = bisect_left(self._by_size, (capacity_bytes, -1))
        if at == len(self._by_size):
            return None
        size, start = self._by_size[at]
        self._remove(start)
        if size > capacity_bytes:
            self._add(start + capacity_bytes, size - capacity_bytes)
        self.used_bytes += capacity_bytes
        self._taken[start] = capacity_bytes
        return Slot(0, start, capacity_bytes)

    def give(self, slot: Slot) -> None:
        """Free a slot.

        Raises:
            ValueError: the slot is not taken (freed twice, or never from here).
        """
        if self._taken.get(slot.offset) != slot.capacity_bytes:
            raise ValueError(f"{slot} is not taken: it was freed before, or is foreign")
        del self._taken[slot.offset]
        self.used_bytes -= slot.capacity_bytes
        self._make_free(slot.offset, slot.capacity_bytes)

    def _make_free(self, start: int, num_bytes: int) -> None:
        """Add a free block, joined with its free neighbours."""
        before = self._start_at.get(start)
        if before is not None:
            num_bytes += self._remove(before)
            start = before
        if start + num_bytes in self._size_at:
            num_bytes += self._remove(start + num_bytes)
        self._add(start, num_bytes)

    def _add(self, start: int, size: int) -> None:
        insort(self._by_size, (size, start))
        self._size_at[start] = size
        self._start_at[start + size] = start

    def _remove(self, start: int) -> int:
        size = self._size_at.pop(start)
        del self._start_at[start + size]
        del self._by_size[bisect_left(self._by_size, (size, start))]
        return size
