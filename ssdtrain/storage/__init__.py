"""Where bytes rest: files, and wrappers that count them or slow them down.

Read down: `base` (the protocol), `slots` (which bytes are free), `directory` (is the
user's directory safe), `posix` (a file). Then `throttle` and `wear` (slowed down,
counted) and `stripe` (one storage over several). `gds` moves GPU memory directly, over
`kvikio_shim`; `malloc_hook` registers that memory. `measure` tells how fast a storage
and the ways to it are, and `open` is the door.
"""

from ssdtrain.storage.base import Slot, Storage, StorageStats
from ssdtrain.storage.open import open_storage
from ssdtrain.storage.posix import PosixStorage
from ssdtrain.storage.throttle import ThrottledStorage

__all__ = [
    "PosixStorage",
    "Slot",
    "Storage",
    "StorageStats",
    "ThrottledStorage",
    "open_storage",
]
