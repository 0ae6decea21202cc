"""A plan as data: what happens to each saved tensor, and when; JSON in, JSON out."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ssdtrain.errors import ConfigError
from ssdtrain.plan.placement import Placement

SCHEMA = "ssdtrain-plan"
SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Order:
    """What is to happen to one item. See [Note: marks] in plan/profile.py."""

    name: str
    """Name and bytes of the item; a lane that brings another is not planned for."""
    num_bytes: int
    placement: Placement
    """KEEP, OFFLOAD (host memory), OFFLOAD_SSD or RECOMPUTE."""
    release_after: int = 0
    """Marks after its pack at which compute waits for the copy and drops the bytes;
    0: never, it is kept although it was copied."""
    load_at: int = 0
    """Number of the use in its lane's backward at which the load starts; 0 is the
    first."""
    owner: int = -1
    """As in the profile: exists only if that item is recomputed."""


@dataclass(frozen=True, kw_only=True)
class LinkLoad:
    """Traffic of one link in one step."""

    num_bytes: int
    busy_ms: float


@dataclass(frozen=True, kw_only=True)
class Stall:
    """A wait of compute for a transfer."""

    lane: int
    item: int
    ms: float


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What the simulator says of a plan."""

    step_ms: float
    peak_bytes: int
    """Most device memory in forward and backward above the step's start."""
    stall_ms: float
    recompute_ms: float
    keep_ms: float
    """The step with everything kept."""
    keep_peak_bytes: int
    links: Mapping[str, LinkLoad] = field(default_factory=dict)
    stalls: tuple[Stall, ...] = ()
    """The longest first, ten at most."""
    host_peak_bytes: int = 0
    """Most bytes resting in pinned host memory."""

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

    def bytes_by_placement(self) -> dict[str, int]:
        """Bytes of one lane of each kind, by placement."""
        sums: dict[str, int] = {}
        for orders in self.orders.values():
            for order in orders:
                if order.owner < 0 or _is_owned(orders, order):
                    name = order.placement.name.lower()
                    sums[name] = sums.get(name, 0) + order.num_bytes
        return sums


def _is_owned(orders: tuple[Order, ...], order: Order) -> bool:
    return orders[order.owner].placement is Placement.RECOMPUTE


def to_json(plan: Plan) -> dict[str, Any]:
    """Plain values, with the schema's name and version."""
    values = asdict(plan)
    for orders in values["orders"].values():
        for order in orders:
            order["placement"] = order["placement"].name.lower()
    return {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, **values}


def from_json(values: Mapping[str, Any]) -> Plan:
    """Build a `Plan` from what `to_json` made, perhaps edited.

    Raises:
        ConfigError: another schema or version, or a field that is missing or wrong.
    """
    found = (values.get("schema"), values.get("schema_version"))
    if found != (SCHEMA, SCHEMA_VERSION):
        raise ConfigError(
            f"a plan has schema {SCHEMA!r} version {SCHEMA_VERSION}, got {found[0]!r} "
            f"version {found[1]!r}; make it again with `ssdtrain plan`."
        )
    try:
        orders = {
            kind: tuple(
                Order(**{**o, "placement": Placement[o["placement"].upper()]})
                for o in found_orders
            )
            for kind, found_orders in values["orders"].items()
        }
        prediction = values.get("prediction")
        return Plan(
            orders=orders,
            policy=values["policy"],
            prediction=None if prediction is None else _prediction(prediction),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"the plan is damaged ({type(error).__name__}: {error}); make it again "
            "with `ssdtrain plan`."
        ) from error


def _prediction(values: Mapping[str, Any]) -> Prediction:
    links = {name: LinkLoad(**load) for name, load in values["links"].items()}
    stalls = tuple(Stall(**stall) for stall in values["stalls"])
    return Prediction(**{**values, "links": links, "stalls": stalls})


def read_plan(path: str | Path) -> Plan:
    """Read a plan.

    Raises:
        ConfigError: it cannot be read, or is not a plan of this version.
    """
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            "plan expects 'auto', 'offload-all', 'keep-all' or the path of a saved "
            f"plan, got {str(path)!r} ({error}); make one with `ssdtrain plan`."
        ) from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds a {type(values).__name__}, not a plan")
    return from_json(values)
