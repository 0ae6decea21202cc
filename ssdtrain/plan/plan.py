"""A plan as data: what happens to each saved tensor, and when; JSON in, JSON out."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path

from ssdtrain.errors import ConfigError
from ssdtrain.jsonfile import Duration, Format, Index, Natural, Unfit
from ssdtrain.plan.placement import AWAY_PLACEMENTS, Placement

PLACEMENTS = (
    Placement.KEEP,
    Placement.OFFLOAD,
    Placement.OFFLOAD_SSD,
    Placement.RECOMPUTE,
    Placement.RERUN,
)
"""What a plan may say; the others are a policy's, at the moment of packing."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What is to happen to one item. See [Note: marks] in plan/profile.py."""

    name: str
    """Name and bytes of the item; a lane that brings another is not planned for."""
    num_bytes: Natural
    placement: Placement
    """KEEP, OFFLOAD (host memory), OFFLOAD_SSD, RECOMPUTE or RERUN."""
    release_after: Natural = 0
    """Marks after its pack at which compute waits for the copy and drops the bytes;
    0: never, it is kept although it was copied."""
    load_at: Natural = 0
    """Number of the use in its lane's backward at which the load starts; 0 is the
    first."""
    load_batch: Natural = 0
    """Loads of one number that start at one use are a batch: compute waits once for all
    of them. The least number starts first. 0: it is waited for by itself."""
    owner: Index = -1
    """As in the profile: exists only if that item is recomputed."""
    region: Index = -1
    """As in the profile: the region call in whose forward it is saved."""
    serves: Index = -1
    """As in the profile: exists only if that region runs again."""
    floats: bool = False
    """As in the profile: it may be saved later."""


@dataclass(frozen=True, kw_only=True)
class LinkLoad:
    """Traffic of one link in one step."""

    num_bytes: Natural
    busy_ms: Duration


class Wait(str, Enum):
    """What compute waited for."""

    COPY_OUT = "copy out"
    COPY_IN = "copy in"
    STAGING = "room in pinned memory"
    SSD = "SSD"
    HOST = "host"


@dataclass(frozen=True, kw_only=True)
class PredictedStall:
    """A wait of compute, at a saved tensor."""

    lane: Natural
    item: Natural
    ms: Duration
    cause: Wait = Wait.COPY_IN


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What the simulator says of a plan."""

    step_ms: Duration
    peak_bytes: Natural
    """Most device memory in forward and backward above the step's start."""
    stall_ms: Duration
    recompute_ms: Duration
    keep_ms: Duration
    """The step with everything kept."""
    keep_peak_bytes: Natural
    links: Mapping[str, LinkLoad] = field(default_factory=dict)
    stalls: tuple[PredictedStall, ...] = ()
    """For transfers; the longest first, ten at most."""
    host_wait_ms: Duration = 0.0
    """Time in which compute waits for the host, beyond a step without ssdtrain."""
    host_stalls: tuple[PredictedStall, ...] = ()
    """Of `host_wait_ms` as well."""
    waits: Mapping[str, float] = field(default_factory=dict)
    """ms of all waits by cause (`Wait`)."""
    host_peak_bytes: Natural = 0
    """Most bytes resting in pinned host memory."""
    passing_peak_bytes: Natural = 0
    """As `peak_bytes`, without what stays until the end of backward: gradients."""

    @property
    def overhead(self) -> float:
        """Fraction of `keep_ms` that is added."""
        return self.step_ms / self.keep_ms - 1 if self.keep_ms else 0.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Orders for every item of every kind of lane."""

    orders: Mapping[str, tuple[Order, ...]]
    policy: str
    """How it came about: the name of a fixed policy, or `search`."""
    prediction: Prediction | None = None

    def regions_of(self, kind: str) -> frozenset[int]:
        """Return region calls of a kind of lane that run again."""
        return frozenset(
            order.region
            for order in self.orders.get(kind, ())
            if order.placement is Placement.RERUN
        )

    @cached_property
    def keeps_all(self) -> bool:
        """Whether nothing moves and nothing is rebuilt: no hooks are needed."""
        return all(
            order.placement is Placement.KEEP
            for orders in self.orders.values()
            for order in orders
        )

    @cached_property
    def moves_nothing(self) -> bool:
        """Whether nothing leaves the device."""
        return not any(
            order.placement in AWAY_PLACEMENTS
            for orders in self.orders.values()
            for order in orders
        )

    def saves(self, kind: str, order: Order) -> bool:
        """Return whether an item of a kind of lane is saved at all: one that serves a
        recipe or a region may not be."""
        if order.serves >= 0 and order.serves not in self.regions_of(kind):
            return False
        owner = None if order.owner < 0 else self.orders[kind][order.owner]
        return owner is None or owner.placement is Placement.RECOMPUTE

    def bytes_by_placement(self) -> dict[str, int]:
        """Return bytes of one lane of each kind, by placement."""
        sums: dict[str, int] = {}
        for kind, orders in self.orders.items():
            for order in orders:
                if self.saves(kind, order):
                    name = order.placement.name.lower()
                    sums[name] = sums.get(name, 0) + order.num_bytes
        return sums


def batches(
    items: Iterable[int], number_of: Callable[[int], int]
) -> list[tuple[int, ...]]:
    """Return loads that start at one use by batch; see `Order.load_batch`.

    Args:
        items: in the order in which they start.
        number_of: an item's `load_batch`.
    """
    found: list[list[int]] = []
    last = 0
    for item in sorted(items, key=number_of):  # stable
        number = number_of(item)
        if number and number == last:
            found[-1].append(item)
        else:
            found.append([item])
        last = number
    return [tuple(batch) for batch in found]


def _check(plan: Plan) -> None:
    for kind, orders in plan.orders.items():
        for number, order in enumerate(orders):
            where = f"orders.{kind}[{number}]"
            if order.placement not in PLACEMENTS:
                names = " or ".join(repr(one.name.lower()) for one in PLACEMENTS)
                raise Unfit(f"{where}.placement", names, order.placement.name.lower())
            if order.owner >= len(orders) or order.owner == number:
                raise Unfit(f"{where}.owner", "another item of the lane", order.owner)


PLAN_FILE = Format(
    kind=Plan,
    schema="ssdtrain-plan",
    version=1,
    what="a plan",
    remedy="make it again with `ssdtrain plan`",
    check=_check,
)


def read_plan(path: str | Path) -> Plan:
    """Read a plan that the user named.

    Raises:
        ConfigError: it cannot be read.
        DamagedFileError: it is not a plan of this version.
    """
    try:
        return PLAN_FILE.read(path)
    except OSError as error:
        raise ConfigError(
            "plan expects 'auto', 'offload-all', 'keep-all' or the path of a saved "
            f"plan, got {str(path)!r} ({error}); make one with `ssdtrain plan`."
        ) from error
