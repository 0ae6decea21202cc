"""What parts of the planner see of a cache, made by hand."""

from dataclasses import dataclass, field
from typing import Any

from ssdtrain.cache.bysize import PlansBySize
from ssdtrain.cache.lanes import LaneSize
from ssdtrain.plan.plan import Plan, Prediction
from ssdtrain.transfer.device import MemoryLevel


class HandClock:
    """A step ends when a test says so."""

    def __init__(self) -> None:
        self.ms = 0.0

    def now(self) -> float:
        return self.ms

    def ms_between(self, start: float, end: float) -> float:
        return end - start


@dataclass
class Cursor:
    """What a step under a plan has told."""

    plan: Plan | None = None
    num_resized: int = 0
    num_strayed: int = 0
    num_outgrown: int = 0
    num_beside: int = 0
    planned_bytes: int = 0
    resized_bytes: int = 0
    most_ratio: float = 0.0
    runs_all: bool = False
    by_size: PlansBySize = field(default_factory=PlansBySize)


@dataclass
class Ledger:
    clock: HandClock = field(default_factory=HandClock)
    start: MemoryLevel | None = None
    watches_peaks: bool = False
    levels: tuple[MemoryLevel | None, MemoryLevel | None] = (None, None)

    def start_level(self) -> MemoryLevel | None:
        return self.start


@dataclass
class Lanes:
    largest: dict[str, LaneSize] = field(default_factory=dict)

    def take_largest(self) -> dict[str, LaneSize]:
        taken, self.largest = self.largest, {}
        return taken


@dataclass
class Device:
    capacity: int | None = None
    level: MemoryLevel | None = None
    runs_beside: bool = True

    def capacity_bytes(self) -> int | None:
        return self.capacity

    def memory(self) -> MemoryLevel | None:
        return self.level

    def reset_peak(self) -> None:
        """Nobody else looks."""


@dataclass
class Cache:
    """Stands in for `TensorCache`."""

    cursor: Cursor = field(default_factory=Cursor)
    ledger: Ledger = field(default_factory=Ledger)
    lanes: Lanes = field(default_factory=Lanes)
    device: Device = field(default_factory=Device)
    offloader: Any = None
    tables: Any = None


def promise(
    step_ms: float, *, keep_ms: float = 100.0, peak_bytes: int = 0, **more: Any
) -> Plan:
    """A plan that predicts this, and orders nothing."""
    prediction = Prediction(
        step_ms=step_ms,
        peak_bytes=peak_bytes,
        stall_ms=0.0,
        recompute_ms=0.0,
        keep_ms=keep_ms,
        keep_peak_bytes=peak_bytes,
        **more,
    )
    return Plan(orders={}, policy="promised", prediction=prediction)
