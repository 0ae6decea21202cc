"""What the parts of the cache share: each is given the `TensorCache`, and sees this."""

import threading
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from ssdtrain.cache.captured import Captures
from ssdtrain.cache.cursor import Cursor
from ssdtrain.cache.executor import Executor
from ssdtrain.cache.lanes import Lanes
from ssdtrain.cache.ledger import HookSpans, Ledger
from ssdtrain.cache.record import Handle, Lane, Record, Retired
from ssdtrain.cache.verify import Verifier
from ssdtrain.cache.window import CacheLimits
from ssdtrain.forks import Owner
from ssdtrain.transfer.device import Device
from ssdtrain.transfer.offloader import Offloader


class Meter(Protocol):
    """Times the hooks of a step from outside (`HostMeter` in observe/hosttime.py)."""

    device_spans: HookSpans | None
    """What the device waited inside the hooks, if that is asked for."""

    def around(
        self, pack: Callable[[Any], Any], unpack: Callable[[Any], Any]
    ) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
        """The hooks, timed."""

    def load(self, start: Callable[[Any], None], record: Any) -> None:
        """Start a load, timed by itself."""

    def outside_ns(self) -> int:
        """The program's own host time so far, in ns."""

    def region_began(self, since_ns: int) -> None:
        """What was outside since then is a region call's."""

    def region_ended(self, since_ns: int) -> None:
        """The same."""


class CacheContext(Protocol):
    """`TensorCache`, as its parts see it: see there."""

    captures: Captures
    cursor: Cursor
    device: Device
    lanes: Lanes
    ledger: Ledger
    limits: CacheLimits
    lock: "threading.RLock"
    meter: Meter | None
    moves: Executor
    nothing: Tensor
    offloader: Offloader
    owner: Owner
    retired: Retired
    verifier: Verifier

    def collect(self) -> None: ...
    def enter_backward(self, lane: Lane) -> None: ...
    def is_left_alone(self) -> bool: ...
    def needs_no_record(self, call: Any) -> bool: ...
    def pack(self, tensor: Tensor) -> Handle: ...
    def place_again(self, record: Record) -> None: ...
