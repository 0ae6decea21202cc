"""What moves bytes, and at which rate: a rank's own links, those that plans are made
with (`curves.py`), and the fabric between ranks."""

from dataclasses import dataclass, replace

from ssdtrain.curves import Curve, Links
from ssdtrain.errors import ConfigError
from ssdtrain.tools.foresight.collectives import (
    Collective,
    Fabric,
    Network,
    load_fabric,
    straight_fabric,
)
from ssdtrain.tools.foresight.graph import Node, Stream
from ssdtrain.tools.foresight.spec import DeviceSpec

# What a collective's first byte takes, where no curve was measured.
STARTUP_US = 20.0
# Of the data sheet's rate between devices, what collectives reach (data/*.fabric.json).
PEER_SHARE = 0.6
MEASURED_FABRICS = {"h100": "nvlink", "h200": "nvlink"}
"""Shipped curves by device."""


@dataclass(frozen=True, kw_only=True)
class Wires:
    """Prices nodes that move bytes."""

    links: Links | None = None
    """To the host and the SSD; None: the graph has no copies."""
    fabric: Network | None = None
    """To other ranks; None: the graph has no collectives."""
    num_ranks: int = 1
    """Of a collective whose node does not name its own."""

    @property
    def collective_slowdown(self) -> float:
        """Fraction by which kernels are slower while a collective runs."""
        return 0.0 if self.fabric is None else self.fabric.compute_slowdown

    def microseconds(self, node: Node) -> float:
        """Time of a node when nothing else is under way. Raises ConfigError: the node's
        link was not given, or not measured."""
        num_bytes = float(node.attr["num_bytes"])
        if node.stream is Stream.COMMUNICATION:
            if self.fabric is None:
                raise ConfigError(f"{node.name} needs the fabric between ranks")
            kind = Collective(node.attr["collective"])
            num_ranks = int(node.attr.get("ranks", self.num_ranks))
            return self.fabric.microseconds(kind, num_bytes, num_ranks)
        return self._curve(node).seconds(num_bytes) * 1e6

    def _curve(self, node: Node) -> Curve:
        curve = None
        if self.links is not None:
            out, into = self.links.ways
            curve = {
                Stream.COPY_OUT: out,
                Stream.COPY_IN: into,
                Stream.SSD_WRITE: self.links.ssd_write,
                Stream.SSD_READ: self.links.ssd_read,
            }.get(node.stream)
        if curve is None:
            raise ConfigError(
                f"{node.name} needs a curve of {node.stream.value}; measure links with "
                "`ssdtrain doctor --save FILE`."
            )
        return curve


def fabric_of(spec: DeviceSpec) -> Fabric:
    """Measured curves of a device's links to others, as far as they are shipped; else
    its data sheet. Raises ConfigError: neither is known."""
    if spec.peer_gb_per_s is None:
        raise ConfigError(
            f"nothing is known of the links between devices of {spec.name}; give "
            "--fabric FILE."
        )
    straight = straight_fabric(STARTUP_US, PEER_SHARE * spec.peer_gb_per_s)
    measured = MEASURED_FABRICS.get(spec.name)
    if measured is None:
        return straight
    found = load_fabric(measured)
    return replace(found, curves={**straight.curves, **found.curves})
