"""The link file: measured size-to-time curves, one for each way bytes can take.

Plain data and JSON. The planner prices a transfer with `Curve.seconds`; `doctor`
writes the file. docs/doctor.md describes the schema for other readers.
"""

import json
import math
import os
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from ssdtrain.errors import ConfigError

SCHEMA = "ssdtrain-links"
SCHEMA_VERSION = 1


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

    size_bytes: int
    """Bytes of one transfer."""
    seconds: float
    """Link time of one transfer: wall time of a run of equal transfers, over
    their number, with the link's `depth` of them in flight."""


@dataclass(frozen=True, kw_only=True)
class Sigmoid:
    """log10 of the bandwidth in bytes/s, as a function of x = log2(bytes)."""

    height: float
    steepness: float
    middle: float
    """log2 of the bytes where the bandwidth is half-way (on a log scale)."""
    base: float

    def log10_bandwidth(self, log2_bytes: float) -> float:
        """height / (1 + exp(-steepness (x - middle))) + base."""
        power = -self.steepness * (log2_bytes - self.middle)
        return self.height / (1.0 + math.exp(min(power, 700.0))) + self.base


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Transfer time in three pieces: flat, sigmoid, linear.

    From Lin, Performance Modeling and Optimization for ML Workloads, Eq. 5.2:
    `t_s` up to m1, a fitted sigmoid of the bandwidth between m1 and m2, and
    `t_s + m / BW_max` from m2 on. Ours never decreases with the size.
    """

    startup_seconds: float
    """t_s: what the smallest transfer costs."""
    bytes_per_second: float
    """BW_max: the slope of the last piece."""
    small_bytes: int
    """m1: up to here the size does not matter."""
    large_bytes: int
    """m2: from here on the time is linear in the size."""
    sigmoid: Sigmoid
    fit_error: float
    """Largest |fitted - measured| / measured over the samples."""

    def seconds(self, num_bytes: float) -> float:
        """Link time in seconds of one transfer of `num_bytes`."""
        if num_bytes <= 0:
            return 0.0
        if num_bytes <= self.small_bytes:
            return self.startup_seconds
        linear = self.startup_seconds + num_bytes / self.bytes_per_second
        if num_bytes >= self.large_bytes:
            return linear
        log_rate = self.sigmoid.log10_bandwidth(math.log2(num_bytes))
        # Clamped so that the three pieces join without a step downwards.
        top = self.startup_seconds + self.large_bytes / self.bytes_per_second
        return min(max(num_bytes / math.pow(10.0, log_rate), self.startup_seconds), top)

    def gb_per_s(self, num_bytes: float) -> float:
        """Effective bandwidth in GB/s (1e9) of transfers of `num_bytes`."""
        return num_bytes / self.seconds(num_bytes) / 1e9

    def bytes_within(self, seconds: float) -> int:
        """Most bytes one transfer can move in `seconds` (0 if not even one byte)."""
        if seconds < self.startup_seconds:
            return 0
        low, high = 0.0, max(seconds, 0.0) * self.bytes_per_second + self.large_bytes
        for _ in range(64):
            middle = (low + high) / 2
            if self.seconds(middle) <= seconds:
                low = middle
            else:
                high = middle
        return int(low)


@dataclass(frozen=True, kw_only=True)
class Link:
    """One measured way: where from, where to, how many at once, and the curve."""

    kind: LinkKind
    source: str
    """`cuda:0`, `host`, or the directory for a storage."""
    target: str
    depth: int
    """Transfers in flight (threads for a storage, 1 for copies)."""
    mode: str
    """`direct` or `buffered`, `pinned` or `pageable`, `peer access` or
    `through the host`."""
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
        """All links of a kind, in measured order."""
        return tuple(link for link in self.links if link.kind is kind)

    def best(self, kind: LinkKind, num_bytes: int) -> Link | None:
        """The link (and depth) of that kind that moves `num_bytes` fastest."""
        return min(
            self.of_kind(kind),
            key=lambda link: link.curve.seconds(num_bytes),
            default=None,
        )


def to_json(links: LinkFile) -> dict[str, Any]:
    """Plain values, with the schema's name and version."""
    values = asdict(links)
    for link, plain in zip(links.links, values["links"], strict=True):
        plain["kind"] = link.kind.value
    return {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, **values}


def from_json(values: dict[str, Any]) -> LinkFile:
    """Build a `LinkFile` from what `to_json` made.

    Raises:
        ConfigError: another schema or version, or a field that is missing or wrong.
    """
    found = (values.get("schema"), values.get("schema_version"))
    if found != (SCHEMA, SCHEMA_VERSION):
        raise ConfigError(
            f"a link file has schema {SCHEMA!r} version {SCHEMA_VERSION}, got "
            f"{found[0]!r} version {found[1]!r}; measure again with "
            "`ssdtrain doctor --save FILE`."
        )
    try:
        links = tuple(_link(plain) for plain in values["links"])
        return LinkFile(
            created_utc=values["created_utc"], links=links, machine=values["machine"]
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the link file is damaged ({type(error).__name__}: {error}); measure "
            "again with `ssdtrain doctor --save FILE`."
        ) from error


def _link(plain: dict[str, Any]) -> Link:
    curve = dict(plain["curve"])
    curve["sigmoid"] = Sigmoid(**curve["sigmoid"])
    rest = {k: v for k, v in plain.items() if k not in ("kind", "samples", "curve")}
    return Link(
        kind=LinkKind(plain["kind"]),
        samples=tuple(Sample(**sample) for sample in plain["samples"]),
        curve=Curve(**curve),
        **rest,
    )


def read_links(path: str | Path) -> LinkFile:
    """Read a link file.

    Raises:
        OSError: the file cannot be read.
        ConfigError: it is not a link file of this version.
    """
    text = Path(path).read_text(encoding="utf-8")
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds a {type(values).__name__}, not a link file")
    return from_json(values)


def write_links(path: str | Path, links: LinkFile) -> None:
    """Write a link file; readers see the old one or the new one, never half.

    Raises:
        OSError: the file cannot be written.
    """
    path = Path(path)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        text = json.dumps(to_json(links), indent=1) + "\n"
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
