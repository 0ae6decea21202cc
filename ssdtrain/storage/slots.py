"""Which bytes of which file are free: best fit, coalescing, nothing else.

Pure bookkeeping: it never touches a file. Its owner holds the lock and extends the
files (see `posix.PosixStorage` and `memory.MemoryStorage`).
"""

from bisect import bisect_left, insort

from ssdtrain.storage.base import Slot, StorageStats

ALIGNMENT_BYTES = 4096
"""Direct I/O and page size: slots start and end on it."""


def round_up(num_bytes: int, alignment_bytes: int) -> int:
    """Return the least multiple of `alignment_bytes` that holds `num_bytes`."""
    return -(-num_bytes // alignment_bytes) * alignment_bytes


class FreeSpace:
    """The free blocks of one file, best fit, lowest offset first among equals.

    Best fit leaves large blocks whole for large records. Neighbours are joined as
    soon as they are both free, so a file whose slots are all free is one block
    again: the next step starts from the same state and takes the same places.
    """

    def __init__(self) -> None:
        self.end_bytes = 0
        self._by_size: list[tuple[int, int]] = []  # (size, start), sorted
        self._size_at: dict[int, int] = {}  # start -> size
        self._start_at: dict[int, int] = {}  # end -> start

    @property
    def num_blocks(self) -> int:
        """Separate free blocks; 1 when everything is free."""
        return len(self._by_size)

    @property
    def free_bytes(self) -> int:
        """Bytes in all free blocks."""
        return sum(self._size_at.values())

    def extend(self, num_bytes: int) -> None:
        """The file became `num_bytes` longer."""
        start = self.end_bytes
        self.end_bytes += num_bytes
        self.give(start, num_bytes)

    def missing_bytes(self, num_bytes: int) -> int:
        """Return how far the file must grow so that `num_bytes` fit at its end."""
        tail_start = self._start_at.get(self.end_bytes, self.end_bytes)
        return max(0, num_bytes - (self.end_bytes - tail_start))

    def take(self, num_bytes: int) -> int | None:
        """Start of a block of `num_bytes`, no longer free; None when none fits."""
        place = bisect_left(self._by_size, (num_bytes, -1))
        if place == len(self._by_size):
            return None
        size, start = self._by_size.pop(place)
        self._forget(start, size)
        if size > num_bytes:
            self._remember(start + num_bytes, size - num_bytes)
        return start

    def give(self, start: int, num_bytes: int) -> None:
        """Make a block free and join it with free neighbours."""
        before = self._start_at.get(start)
        if before is not None:
            self._remove(before)
            num_bytes += start - before
            start = before
        after = self._size_at.get(start + num_bytes)
        if after is not None:
            self._remove(start + num_bytes)
            num_bytes += after
        self._remember(start, num_bytes)

    def _remove(self, start: int) -> None:
        size = self._size_at[start]
        self._by_size.pop(bisect_left(self._by_size, (size, start)))
        self._forget(start, size)

    def _remember(self, start: int, size: int) -> None:
        insort(self._by_size, (size, start))
        self._size_at[start] = size
        self._start_at[start + size] = start

    def _forget(self, start: int, size: int) -> None:
        del self._size_at[start]
        del self._start_at[start + size]


class SlotTable:
    """Slots over several files. Not thread-safe: its owner locks.

    Args:
        alignment_bytes: what offsets and capacities are multiples of.
    """

    def __init__(self, alignment_bytes: int = ALIGNMENT_BYTES) -> None:
        self.alignment_bytes = alignment_bytes
        self.files: list[FreeSpace] = []
        self._used_bytes: list[int] = []
        self._live: dict[tuple[int, int], int] = {}  # (file, offset) -> capacity

    def add_file(self, num_bytes: int = 0) -> int:
        """Add a further file of `num_bytes`; return its index."""
        self.files.append(FreeSpace())
        self._used_bytes.append(0)
        if num_bytes:
            self.files[-1].extend(num_bytes)
        return len(self.files) - 1

    @property
    def num_slots(self) -> int:
        """Slots that are taken."""
        return len(self._live)

    @property
    def used_bytes(self) -> int:
        """In slots that are taken."""
        return sum(self._used_bytes)

    @property
    def allocated_bytes(self) -> int:
        """Length of all files."""
        return sum(space.end_bytes for space in self.files)

    def stats(self, *, written_bytes: int, read_bytes: int) -> StorageStats:
        """Return what the slots hold, beside what their owner has moved."""
        return StorageStats(
            used_bytes=self.used_bytes,
            allocated_bytes=self.allocated_bytes,
            written_bytes=written_bytes,
            read_bytes=read_bytes,
        )

    def capacity_for(self, num_bytes: int) -> int:
        """Room that a slot for `num_bytes` takes.

        Raises:
            ValueError: `num_bytes` is below 1.
        """
        if num_bytes < 1:
            raise ValueError(f"a slot expects at least 1 byte, got {num_bytes}")
        return round_up(num_bytes, self.alignment_bytes)

    def by_use(self) -> list[int]:
        """File indices, the least used first: consecutive slots alternate."""
        return sorted(range(len(self.files)), key=lambda i: (self._used_bytes[i], i))

    def missing_bytes(self, file: int, capacity_bytes: int) -> int:
        """Return how far `file` must grow so that the capacity fits at its end."""
        return self.files[file].missing_bytes(capacity_bytes)

    def extend(self, file: int, num_bytes: int) -> None:
        """`file` became longer."""
        self.files[file].extend(num_bytes)

    def take(self, file: int, capacity_bytes: int) -> Slot | None:
        """A slot in `file`, or None when no free block there is large enough."""
        offset = self.files[file].take(capacity_bytes)
        if offset is None:
            return None
        self._used_bytes[file] += capacity_bytes
        self._live[file, offset] = capacity_bytes
        return Slot(file, offset, capacity_bytes)

    def give(self, slot: Slot) -> None:
        """Free a slot.

        Raises:
            ValueError: the slot is not taken (freed twice, or never from here).
        """
        if self._live.get((slot.file, slot.offset)) != slot.capacity_bytes:
            raise ValueError(f"{slot} is not taken: it was freed before, or is foreign")
        del self._live[slot.file, slot.offset]
        self._used_bytes[slot.file] -= slot.capacity_bytes
        self.files[slot.file].give(slot.offset, slot.capacity_bytes)
