"""How long SSDs last, what they cost, and how few will do."""

import math
from dataclasses import dataclass

from ssdtrain.errors import ConfigError
from ssdtrain.tools.project.assumptions import Assumptions
from ssdtrain.tools.project.model import Projection
from ssdtrain.tools.project.tables import PB, Ssd

YEAR_SECONDS = 365 * 24 * 3600.0
HOURS_PER_YEAR = 365 * 24
TB = 1e12


@dataclass(frozen=True, kw_only=True)
class Drives:
    """The SSDs of one GPU, and how they fare in one projection."""

    ssd: Ssd
    count: int
    endurance_bytes: float
    """Bytes that may be written, under the assumptions, to all of them."""
    lifespan_years: float
    """endurance x step time / activations, of uninterrupted training."""
    bandwidth_used: float
    """Required over available write bandwidth; above 1 the step is stalled."""
    capacity_used: float
    """Largest in-flight activations (power-of-two micro-batch) over capacity."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """The fewest drives of one kind for one GPU, and what asks for them."""

    ssd: Ssd
    count: int
    for_endurance: int
    for_bandwidth: int
    for_capacity: int

    @property
    def price_usd(self) -> float:
        """Price of all of them, replacements and energy aside."""
        return self.count * self.ssd.price_usd


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Drives against the GPU they serve, over some years. US dollars, watts."""

    drives_usd: float
    drives_watts: float
    drives_energy_usd: float
    drives_total_usd: float
    """Price, energy, and replacements where the lifespan is shorter than the years."""
    gpu_usd: float | None
    gpu_watts: float
    gpu_energy_usd: float
    gpu_total_usd: float | None
    share: float | None
    """Drives' total over the GPU's; None without a GPU price."""
    usd_per_pb: float
    """Price of one petabyte written here: price per PBW over the endurance factor."""


def endurance_bytes(ssd: Ssd, assume: Assumptions) -> float:
    """Return the bytes one drive may take from us: rating x assumed relief."""
    return ssd.rated_pbw * PB * assume.endurance_factor


def lifespan_seconds(
    endurance: float, step_seconds: float, activation_bytes: float
) -> float:
    """t_life = S_endurance t_step / S_activations (5.3.6)."""
    return endurance * step_seconds / activation_bytes


def wear(found: Projection, ssd: Ssd, count: int, assume: Assumptions) -> Drives:
    """`count` drives for each GPU. Raises ConfigError: count below 1."""
    if count < 1:
        raise ConfigError(f"drives for each GPU expects 1 or more, got {count}")
    endurance = count * endurance_bytes(ssd, assume)
    seconds = lifespan_seconds(endurance, found.step_seconds, found.activation_bytes)
    capacity = count * ssd.capacity_tb * TB
    return Drives(
        ssd=ssd,
        count=count,
        endurance_bytes=endurance,
        lifespan_years=seconds / YEAR_SECONDS,
        bandwidth_used=found.write_gb_per_s / (count * ssd.write_gb_per_s),
        capacity_used=found.power_of_two_in_flight_bytes / capacity,
    )


def fewest(found: Projection, ssd: Ssd, years: float, assume: Assumptions) -> Need:
    """Return the fewest drives that suffice. Raises ConfigError: years not above 0."""
    if years <= 0:
        raise ConfigError(f"years expects more than 0, got {years}")
    one = wear(found, ssd, 1, assume)
    needs = (
        math.ceil(years / one.lifespan_years),
        math.ceil(one.bandwidth_used),
        math.ceil(one.capacity_used),
    )
    return Need(
        ssd=ssd,
        count=max(1, *needs),
        for_endurance=needs[0],
        for_bandwidth=needs[1],
        for_capacity=needs[2],
    )


def cost_of_drives(
    found: Projection, drives: Drives, years: float, assume: Assumptions
) -> Cost:
    """Return what the drives of one GPU cost over `years`, against the GPU itself.
    Raises ConfigError: years not above 0."""
    if years <= 0:
        raise ConfigError(f"years expects more than 0, got {years}")
    gpu, ssd = found.case.gpu, drives.ssd
    sets = max(1.0, years / drives.lifespan_years)
    usd_per_kwh = assume.electricity_usd_per_kwh * assume.power_overhead
    usd_per_watt = HOURS_PER_YEAR * usd_per_kwh * years / 1e3
    drives_usd = drives.count * ssd.price_usd
    drives_watts = drives.count * ssd.watts
    drives_energy = drives_watts * usd_per_watt
    gpu_watts = gpu.spec.power_limit_watts
    gpu_energy = gpu_watts * usd_per_watt
    gpu_total = None if gpu.price_usd is None else gpu.price_usd + gpu_energy
    drives_total = drives_usd * sets + drives_energy
    return Cost(
        drives_usd=drives_usd,
        drives_watts=drives_watts,
        drives_energy_usd=drives_energy,
        drives_total_usd=drives_total,
        gpu_usd=gpu.price_usd,
        gpu_watts=gpu_watts,
        gpu_energy_usd=gpu_energy,
        gpu_total_usd=gpu_total,
        share=None if gpu_total is None else drives_total / gpu_total,
        usd_per_pb=ssd.price_per_pbw_usd / assume.endurance_factor,
    )
