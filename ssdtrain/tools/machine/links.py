"""The link file: measured size-to-time curves, one for each way bytes can take, as JSON
(docs/doctor.md). `doctor` writes it, the planner prices transfers with it."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ssdtrain.curves import Curve
from ssdtrain.jsonfile import Duration, Format, Natural


class LinkKind(str, Enum):
    """The ways bytes can take. `size_bytes` of a sample is what moves one way."""

    D2H = "d2h"
    """GPU memory to pinned host memory."""
    H2D = "h2d"
    """Pinned host memory to GPU memory."""
    BOTH = "both"
    """D2H and H2D at once: the time until both directions moved `size_bytes`."""
    PEER = "peer"
    """GPU memory to another GPU's memory."""
    SSD_WRITE = "ssd_write"
    """Host memory to a file, O_DIRECT unless `mode` says otherwise."""
    SSD_READ = "ssd_read"
    """A file to host memory, O_DIRECT unless `mode` says otherwise."""
    HOST_COPY = "host_copy"
    """Host memory to host memory: what the host target costs without a GPU."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One measured point."""

    size_bytes: Natural
    """Bytes of one transfer."""
    seconds: Duration
    """Of one transfer: wall time of a run over its number, `depth` in flight."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """One measured way: where from, where to, how many at once, and the curve."""

    kind: LinkKind
    source: str
    """`cuda:0`, `host`, or the directory for a storage."""
    target: str
    depth: Natural
    """Transfers in flight (threads for a storage, 1 for copies)."""
    mode: str
    """`direct`, `buffered`, `pinned`, `pageable`, `peer access`, `through the host`."""
    samples: tuple[Sample, ...]
    curve: Curve


@dataclass(frozen=True, kw_only=True)
class LinkFile:
    """Everything `doctor` measured on one machine at one time."""

    created_utc: str
    """ISO 8601, when the measurement started."""
    links: tuple[Link, ...]
    machine: dict[str, Any] = field(default_factory=dict)
    """Facts that identify the machine: host name, GPUs, versions."""

    def of_kind(self, kind: LinkKind) -> tuple[Link, ...]:
        """Return all links of a kind, in measured order."""
        return tuple(link for link in self.links if link.kind is kind)


LINK_FILE = Format(
    kind=LinkFile,
    schema="ssdtrain-links",
    version=1,
    what="a link file",
    remedy="measure again with `ssdtrain doctor --save FILE`",
)
