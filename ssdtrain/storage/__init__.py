"""Where bytes rest: files, memory, and wrappers that count, slow down or break them.

Read down: `base` (the protocol), `slots` (which bytes are free), `directory` (is the
user's directory safe), `blockio` (what a buffer must be), `memory` and `posix` (the
storages), `forwarding` (what wrappers share), `throttle`, `faulty` and `wear` (slowed
down, broken, counted), `gds` (straight from GPU memory, over `kvikio_shim`;
`malloc_hook` registers that memory), `measure` (how fast a storage and the ways to it
are), `stripe` (one storage over several), `open` (the door).
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
