"""Which bytes of a file are free: best fit, neighbours joined at once.

Pure bookkeeping: it never touches the file. Its owner holds the lock and extends the
file (see `posix.PosixStorage`).
"""

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
    are all free is one block again: the next step takes the same places. Free blocks
    are few, so all of them are looked at.
    """

    def __init__(self) -> None:
        self.end_bytes = 0
        """Length of the file."""
        self.used_bytes = 0
        """In slots that are taken."""
        self._taken: dict[int, int] = {}  # offset -> capacity
        self._free: dict[int, int] = {}  # start -> size

    @property
    def num_free_blocks(self) -> int:
        """Separate free blocks; 1 when everything is free."""
        return len(self._free)

    def extend(self, num_bytes: int) -> None:
        """The file became `num_bytes` longer."""
        start = self.end_bytes
        self.end_bytes += num_bytes
        self._make_free(start, num_bytes)

    def missing_bytes(self, num_bytes: int) -> int:
        """Return how far the file must grow so that `num_bytes` fit at its end."""
        last = self._free_before(self.end_bytes)
        return max(0, num_bytes - (self.end_bytes - last))

    def take(self, capacity_bytes: int) -> Slot | None:
        """A slot of this capacity; None when no free block is large enough."""
        large = [(n, at) for at, n in self._free.items() if n >= capacity_bytes]
        if not large:
            return None
        size, start = min(large)
        del self._free[start]
        if size > capacity_bytes:
            self._free[start + capacity_bytes] = size - capacity_bytes
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
        first, end = self._free_before(start), start + num_bytes
        end += self._free.pop(end, 0)
        self._free[first] = end - first

    def _free_before(self, end: int) -> int:
        """Where the free block begins that ends there; `end` itself: there is none."""
        ends = (at for at, size in self._free.items() if at + size == end)
        return next(ends, end)
