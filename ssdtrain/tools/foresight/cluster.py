"""Links of a cluster: inside a node, and between nodes."""

import re
from dataclasses import dataclass, replace

from ssdtrain.errors import ConfigError
from ssdtrain.tools.foresight.collectives import Collective, Fabric, straight_fabric
from ssdtrain.tools.foresight.spec import DeviceSpec
from ssdtrain.tools.foresight.wires import PEER_SHARE, STARTUP_US, fabric_of

BETWEEN = re.compile(r"[a-z]+:(\d+(?:\.\d+)?)G", re.I)
INSIDE = re.compile(r"[a-z]+:(\d+)", re.I)
DEFAULT = "nvlink:8,ib:400G"
EXAMPLE = f"NAME:GPUS_OF_A_NODE[,NAME:GBIT_PER_SECONDG], such as {DEFAULT}"
GBIT_PER_GB = 8.0


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of equal GPUs."""

    node: int
    """GPUs of a node."""
    inside: Fabric
    between: Fabric | None
    """Of one GPU's share of the network; None: there is one node."""

    @property
    def compute_slowdown(self) -> float:
        """Fraction by which kernels are slower while a collective runs."""
        return self.inside.compute_slowdown

    def microseconds(
        self, kind: Collective, message_bytes: float, num_ranks: int, stride: int = 1
    ) -> float:
        """Return the time of a collective of ranks `stride` GPUs apart: inside each
        node, then between nodes on the share that a GPU has by then (all of it in an
        all-to-all). A send of many ranks goes to the next one."""
        if kind is Collective.SEND and num_ranks > 1:
            return self.send_us(message_bytes, (num_ranks - 1) * stride)
        near = max(1, min(num_ranks, self.node // stride))
        far = -(-num_ranks // near)
        inner = self.inside.microseconds(kind, message_bytes, near)
        if far == 1:
            return inner
        if self.between is None:
            raise ConfigError(
                f"{num_ranks * stride} GPUs expect links between nodes of {self.node}; "
                f"set --fabric {EXAMPLE}"
            )
        if kind is not Collective.ALL_TO_ALL:
            message_bytes /= near
        return inner + self.between.microseconds(kind, message_bytes, far)

    def send_us(self, message_bytes: float, distance: int) -> float:
        """Return the time from one GPU to the one `distance` numbers away."""
        is_near = distance < self.node or self.between is None
        fabric = self.inside if is_near else self.between
        if fabric is None:
            raise ConfigError("a send expects links")
        return fabric.microseconds(Collective.SEND, message_bytes, 2)


def cluster_of(text: str, spec: DeviceSpec) -> Cluster:
    """Return what `--fabric` names: measured curves inside a node where they are
    shipped, a network by one GPU's rate, of which collectives reach `PEER_SHARE`.
    Raises ConfigError: the text has another form."""
    inside, *rest = text.split(",")
    node = INSIDE.fullmatch(inside.strip())
    rate = BETWEEN.fullmatch(rest[0].strip()) if rest else None
    if node is None or len(rest) > 1 or (rest and rate is None) or int(node[1]) < 1:
        raise ConfigError(f"--fabric expects {EXAMPLE}, got {text!r}")
    between = None
    if rate is not None:
        between = straight_fabric(STARTUP_US, PEER_SHARE * float(rate[1]) / GBIT_PER_GB)
    fabric = fabric_of(spec)
    curves = {Collective.SEND: fabric.curves[Collective.ALL_GATHER], **fabric.curves}
    inside_fabric = replace(fabric, curves=curves)
    return Cluster(node=int(node[1]), inside=inside_fabric, between=between)
