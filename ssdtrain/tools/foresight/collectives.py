"""What collectives cost: a fitted curve for each operation (Lin 2023, Eq. 5.2).

A curve's bytes are those that one rank puts on its wire: `bus_bytes` turns a message
into them, so that one curve serves every number of ranks on the same links.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol

from ssdtrain.curves import Curve
from ssdtrain.errors import ConfigError
from ssdtrain.jsonfile import Format, Fraction


class Collective(str, Enum):
    """An operation among ranks."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    SEND = "send"
    """From one rank to another."""


def bus_bytes(kind: Collective, message_bytes: float, num_ranks: int) -> float:
    """Bytes that one rank sends. `message_bytes`: of the whole tensor that every rank
    has (all-reduce), gets (all-gather), gives (reduce-scatter, all-to-all) or sends."""
    if num_ranks < 1:
        raise ConfigError(f"a collective expects 1 or more ranks, got {num_ranks}")
    if not message_bytes >= 0:
        raise ConfigError(f"a collective expects 0 or more bytes, got {message_bytes}")
    if kind is Collective.SEND:
        return message_bytes
    share = (num_ranks - 1) / num_ranks
    return (2 if kind is Collective.ALL_REDUCE else 1) * share * message_bytes


def all_to_all_bytes(widths: Sequence[float], batch: int, element_bytes: int) -> float:
    """The message of an all-to-all of looked-up rows (Lin 2023, 5.2): the most bytes
    that any rank sends or receives. `widths`: of each rank's tables; `batch`: over all
    ranks."""
    num_ranks = len(widths)
    if not num_ranks:
        raise ConfigError("an all-to-all expects widths of 1 or more ranks, got none")
    local = batch / num_ranks
    sent = max(widths) * batch
    received = sum(widths) * local
    return max(sent, received) * element_bytes


class Network(Protocol):
    """What collectives run over: one fabric, or a cluster of nodes."""

    @property
    def compute_slowdown(self) -> float:
        """Fraction by which kernels are slower while a collective runs."""

    def microseconds(
        self, kind: Collective, message_bytes: float, num_ranks: int
    ) -> float:
        """Return the time of one operation when all ranks are there."""


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """The links between ranks."""

    curves: Mapping[Collective, Curve]
    name: str = ""
    compute_slowdown: Fraction = 0.0
    """Fraction by which kernels are slower while a collective runs next to them: it
    takes multiprocessors, and products that filled whole waves need another one."""

    def microseconds(
        self, kind: Collective, message_bytes: float, num_ranks: int
    ) -> float:
        """Time of one operation when all ranks are there. Raises ConfigError: the
        operation was not measured."""
        if num_ranks == 1:
            return 0.0
        curve = self.curves.get(kind)
        if curve is None:
            raise ConfigError(
                f"no curve of {kind.value}; measure it with recipes/bench/foresight"
            )
        return curve.seconds(bus_bytes(kind, message_bytes, num_ranks)) * 1e6


FABRIC_FORMAT = Format(
    kind=Fabric,
    schema="ssdtrain-fabric",
    version=1,
    what="a file of collectives' curves",
    remedy="measure it again with `python -m recipes.bench foresight.collectives`",
)
"""Reads and writes what collectives cost."""
FABRIC_SUFFIX = ".fabric.json"
DATA = Path(__file__).parent / "data"


def straight_fabric(startup_us: float, gb_per_s: float) -> Fabric:
    """Links of which only latency and bandwidth are known."""
    if not (startup_us >= 0 and gb_per_s > 0):
        raise ConfigError(
            "links expect a latency of 0 or more and a bandwidth above 0, got "
            f"{startup_us} us and {gb_per_s} GB/s"
        )
    curve = Curve.straight(startup_us * 1e-6, gb_per_s * 1e9)
    return Fabric(curves=dict.fromkeys(Collective, curve))


def load_fabric(name: str | Path) -> Fabric:
    """A shipped fabric by its name (`nvlink`), or a fabric file. Raises
    DamagedFileError: the file holds something else; OSError: it cannot be read."""
    path = Path(name)
    if path.suffix != ".json":
        path = DATA / f"{name}{FABRIC_SUFFIX}"
    return FABRIC_FORMAT.read(path)
