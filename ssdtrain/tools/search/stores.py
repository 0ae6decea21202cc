"""Where a rank's moved activations rest: host memory first, then SSDs, which wear out
at the rates of `ssdtrain project` (Wu 5.3.6)."""

import math
import re
from dataclasses import dataclass

from ssdtrain.errors import ConfigError
from ssdtrain.quantities import parse_size
from ssdtrain.tools.project.assumptions import Assumptions
from ssdtrain.tools.project.endurance import (
    TB,
    YEAR_SECONDS,
    endurance_bytes,
    lifespan_seconds,
)
from ssdtrain.tools.project.tables import GB, SSDS, Ssd, find_row

DRIVES = re.compile(r"([\w-]+):(\d+)")
HOST = "1TB"
"""Of a node, for activations."""
LEAST_YEARS = 3.0
"""That SSDs last when the job runs all the time."""


@dataclass(frozen=True, kw_only=True)
class Resting:
    """What a layout keeps next to the device, on one rank."""

    host_bytes: float
    ssd_bytes: float
    written_bytes: float
    """To the SSDs, a step."""


@dataclass(frozen=True, kw_only=True)
class Stores:
    """One GPU's share of its node."""

    host_bytes: float
    ssd: Ssd | None = None
    drives: float = 0.0
    least_years: float = LEAST_YEARS

    def resting(self, held_bytes: float, moved_bytes: float) -> Resting:
        """Fill host memory with the bytes that are away at one time, then the SSDs."""
        beyond = max(0.0, held_bytes - self.host_bytes)
        share = beyond / held_bytes if beyond else 0.0
        return Resting(
            host_bytes=held_bytes - beyond,
            ssd_bytes=beyond,
            written_bytes=share * moved_bytes,
        )

    def write_ms(self, resting: Resting) -> float:
        """Return what the writes of a step take: no step is shorter."""
        if not resting.written_bytes or self.ssd is None:
            return 0.0
        bytes_per_ms = self.drives * self.ssd.write_gb_per_s * GB / 1e3
        return resting.written_bytes / bytes_per_ms

    def years(self, resting: Resting, step_ms: float) -> float:
        """Return how long the SSDs last."""
        if not resting.written_bytes or self.ssd is None:
            return math.inf
        endurance = self.drives * endurance_bytes(self.ssd, Assumptions())
        seconds = lifespan_seconds(endurance, step_ms / 1e3, resting.written_bytes)
        return seconds / YEAR_SECONDS

    def hold(self, resting: Resting, step_ms: float) -> bool:
        """Return whether there is room, and the SSDs last."""
        capacity = 0.0 if self.ssd is None else self.ssd.capacity_tb * TB * self.drives
        lasts = self.years(resting, step_ms) >= self.least_years
        return resting.ssd_bytes <= capacity and lasts


def stores_of(host: str, drives: str | None, least_years: float, gpus: int) -> Stores:
    """Return one GPU's share of what `--host` and `--ssd` say of a node. Raises
    ConfigError: the text has another form, or no such drive is known."""
    host_bytes = parse_size("--host", host) / gpus
    if drives is None:
        return Stores(host_bytes=host_bytes)
    found = DRIVES.fullmatch(drives)
    if found is None:
        raise ConfigError(f"--ssd expects NAME:NUMBER of a node, got {drives!r}")
    return Stores(
        host_bytes=host_bytes,
        ssd=find_row(SSDS, found[1], "SSD"),
        drives=int(found[2]) / gpus,
        least_years=least_years,
    )
