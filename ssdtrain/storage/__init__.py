"""Where bytes rest: files, alone or several as one, counted for each disk.

Read down: `base` (the protocol), `slots` (which bytes are free), `directory` (is the
user's directory safe), `posix` (a file). Then `wear` (counts what is written) and
`stripe` (one storage over several). `gds` moves GPU memory directly,
through kvikio; `malloc_hook` registers that memory. `measure` tells how fast a storage
and the ways to it are, and `open` is the door.
"""

from ssdtrain.storage.base import Slot, Storage, StorageStats
from ssdtrain.storage.open import open_storage
from ssdtrain.storage.posix import PosixStorage

__all__ = [
    "PosixStorage",
    "Slot",
    "Storage",
    "StorageStats",
    "open_storage",
]
