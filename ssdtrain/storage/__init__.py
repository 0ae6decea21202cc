"""Where bytes rest: files, memory, and wrappers that slow them down or break them.

Read down: `base` (the protocol), `slots` (which bytes are free), `directory` (is the
user's directory safe), `blockio` (move all bytes or raise), `posix` and `memory`
(the storages), `throttle` and `faulty` (wrappers), `open` (the door).
"""

from ssdtrain.storage.base import Slot, Storage, StorageStats
from ssdtrain.storage.memory import MemoryStorage
from ssdtrain.storage.open import open_storage
from ssdtrain.storage.posix import PosixStorage
from ssdtrain.storage.throttle import ThrottledStorage

__all__ = [
    "MemoryStorage",
    "PosixStorage",
    "Slot",
    "Storage",
    "StorageStats",
    "ThrottledStorage",
    "open_storage",
]
