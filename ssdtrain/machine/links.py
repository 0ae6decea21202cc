"""The link file: measured size-to-time curves, one for each way bytes can take.

Plain data and JSON. The planner prices a transfer with `Curve.seconds`; `doctor`
writes the file. docs/doctor.md describes the schema for other readers.
"""

import json
import os
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from ssdtrain.curves import Curve, Sigmoid
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
