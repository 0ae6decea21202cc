"""Slots in main memory: the storage of files, over a file that no disk has."""

import os

from ssdtrain.storage.posix import NamelessFile, PosixStorage


class MemoryStorage(PosixStorage):
    """A `PosixStorage` without a disk."""

    def __init__(
        self, *, extent_bytes: int = 1 << 26, capacity_bytes: int | None = None
    ) -> None:
        super().__init__(
            "memory", extent_bytes=extent_bytes, capacity_bytes=capacity_bytes
        )

    def open_file(self) -> NamelessFile:
        return NamelessFile(os.memfd_create("ssdtrain"))

    def describe(self) -> str:
        return "memory"
