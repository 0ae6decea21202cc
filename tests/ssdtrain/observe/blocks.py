"""A model of torch's caching allocator, for tensors of more than a megabyte.

Whole segments, as `cudaMalloc` gives them: the smallest free block that is large enough
is split; only a segment that is free everywhere goes back. And the one that grows by
pages of 20 MiB, each of which goes back by itself.
"""

from collections.abc import Callable

import torch

from ssdtrain.transfer.device import TRIMMED_SHARE, CpuDevice, MemoryLevel

MIB = 1 << 20
PAGE = 20 * MIB


def up(size: int, unit: int) -> int:
    """The next multiple."""
    return -(-size // unit) * unit


class Block:
    """A part of a segment: `used`, `free`, or (of one that grows) `unmapped`."""

    def __init__(self, segment: list["Block"], at: int, size: int, state: str) -> None:
        self.segment, self.at, self.size, self.state = segment, at, size, state


class Blocks:
    """The allocator, under a limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.grows = False
        self.reserved = self.allocated = self.num_retries = 0
        self._growing: list[Block] = []
        self._growing.append(Block(self._growing, 0, 1 << 50, "unmapped"))
        self._segments = [self._growing]

    def take(self, size: int) -> Block:
        """Allocate; where nothing is left what is cached is given back first."""
        found = self._find(size) or self._new(size)
        if found is None:
            self.num_retries += 1
            self.empty()
            found = self._find(size) or self._new(size)
        if found is None:
            raise torch.OutOfMemoryError(f"{size} more than {self.allocated}")
        rest, found.state = found.size - size, "used"
        if rest > (0 if found.segment is self._growing else MIB):
            found.size = size
            own = Block(found.segment, found.at + size, rest, "free")
            found.segment.insert(found.segment.index(found) + 1, own)
            _join(found.segment)
        self.allocated += found.size
        return found

    def give(self, block: Block) -> None:
        """Free."""
        self.allocated -= block.size
        block.state = "free"
        _join(block.segment)

    def empty(self) -> None:
        """Give back what is cached."""
        for segment in self._segments[1:]:
            if all(block.state == "free" for block in segment):
                self.reserved -= sum(block.size for block in segment)
                self._segments.remove(segment)
        own = self._growing
        for block in [each for each in own if each.state == "free"]:
            start, end = up(block.at, PAGE), (block.at + block.size) // PAGE * PAGE
            if end > start:
                index = own.index(block)
                own[index : index + 1] = [
                    Block(own, block.at, start - block.at, "free"),
                    Block(own, start, end - start, "unmapped"),
                    Block(own, end, block.at + block.size - end, "free"),
                ]
                self.reserved -= end - start
        _join(own)

    def _find(self, size: int) -> Block | None:
        """The best fit; what can grow counts as that large."""
        best: tuple[int, Block] | None = None
        for segment in self._segments if self.grows else self._segments[1:]:
            for block, after in zip(segment, [*segment[1:], None], strict=True):
                if block.state != "free" or block.size < size:
                    continue
                more = after.size if after and after.state == "unmapped" else 0
                if best is None or block.size + more < best[0]:
                    best = block.size + more, block
        return None if best is None else best[1]

    def _new(self, size: int) -> Block | None:
        return self._map(size) if self.grows else self._segment(size)

    def _segment(self, size: int) -> Block | None:
        whole = PAGE if size < PAGE // 2 else up(size, 2 * MIB)
        if self.reserved + whole > self.limit:
            return None
        self.reserved += whole
        segment: list[Block] = []
        segment.append(Block(segment, 0, whole, "free"))
        self._segments.append(segment)
        return segment[0]

    def _map(self, size: int) -> Block | None:
        """Map pages into the first gap, behind what is free before it."""
        own = self._growing
        for index, gap in enumerate(own):
            if gap.state != "unmapped":
                continue
            before = own[index - 1] if index and own[index - 1].state == "free" else gap
            more = up(size - (gap.at - before.at), PAGE)
            if more > gap.size:
                continue
            if self.reserved + more > self.limit:
                return None
            self.reserved += more
            mapped = Block(own, gap.at, more, "free")
            gap.at, gap.size = gap.at + more, gap.size - more
            own.insert(index, mapped)
            _join(own)
            return before if before.state == "free" else mapped
        return None


def _join(segment: list[Block]) -> None:
    """Neighbours that are both free, or both unmapped, are one."""
    kept: list[Block] = []
    for block in segment:
        if not block.size:
            continue
        if kept and block.state == kept[-1].state != "used":
            kept[-1].size += block.size
        else:
            kept.append(block)
    segment[:] = kept


class BlockDevice(CpuDevice):
    """A device with that allocator; what is trained on it has no bytes."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.blocks = Blocks(limit)
        self.torch_device = torch.device("meta")

    def capacity_bytes(self) -> int:  # type: ignore[override]
        """The limit."""
        return self.blocks.limit

    def memory(self) -> MemoryLevel:  # type: ignore[override]
        """What is known of the allocator."""
        own = self.blocks
        return MemoryLevel(own.allocated, own.reserved, own.allocated, own.reserved)

    def trim(self, share: float = TRIMMED_SHARE) -> bool:
        """As a GPU does it."""
        if self.blocks.reserved <= share * self.blocks.limit:
            return False
        self.blocks.empty()
        return True

    def grow_segments(self) -> tuple[str, Callable[[], None]]:
        """From now on."""
        self.blocks.grows = True
        return "", lambda: None
