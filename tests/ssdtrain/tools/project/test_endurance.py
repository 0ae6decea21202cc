"""Lifespan, fewest drives and cost."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdtrain.errors import ConfigError
from ssdtrain.tools.project.assumptions import Assumptions
from ssdtrain.tools.project.cases import figure_5_10
from ssdtrain.tools.project.endurance import (
    YEAR_SECONDS,
    cost_of_drives,
    fewest,
    lifespan_seconds,
    wear,
)
from ssdtrain.tools.project.model import project
from ssdtrain.tools.project.tables import GPUS, SSDS, find_row

ASSUME = Assumptions()
A100 = find_row(GPUS, "a100-pcie", "GPU")
FOUND = project(figure_5_10(A100)[0], ASSUME)


def test_lifespan_is_endurance_over_the_rate_of_writing() -> None:
    drives = wear(FOUND, find_row(SSDS, "d7-p5620", "SSD"), 4, ASSUME)
    assert drives.endurance_bytes == pytest.approx(4 * 65.4e15 * 2.5)
    rate = FOUND.activation_bytes / FOUND.step_seconds
    years = drives.endurance_bytes / rate / YEAR_SECONDS
    assert drives.lifespan_years == pytest.approx(years)
    assert drives.bandwidth_used == pytest.approx(FOUND.write_gb_per_s / (4 * 4.2))
    assert lifespan_seconds(10.0, 2.0, 4.0) == 5.0


@settings(deadline=None, max_examples=40)
@given(
    years=st.floats(0.1, 30.0),
    name=st.sampled_from([ssd.name for ssd in SSDS]),
    relief=st.floats(1.0, 86.0),
)
def test_the_fewest_drives_do_and_one_less_does_not(
    years: float, name: str, relief: float
) -> None:
    assume = replace(ASSUME, retention_factor=relief)
    ssd = find_row(SSDS, name, "SSD")
    need = fewest(FOUND, ssd, years, assume)

    def enough(count: int) -> bool:
        drives = wear(FOUND, ssd, count, assume)
        lasts = drives.lifespan_years >= years * (1 - 1e-9)
        fast = drives.bandwidth_used <= 1 + 1e-9
        return lasts and fast and drives.capacity_used <= 1 + 1e-9

    assert enough(need.count)
    assert need.count == 1 or not enough(need.count - 1)
    assert need.price_usd == pytest.approx(need.count * ssd.price_usd)


def test_cost_against_the_gpu() -> None:
    drives = wear(FOUND, find_row(SSDS, "d7-p5810", "SSD"), 3, ASSUME)
    found = cost_of_drives(FOUND, drives, 3.0, ASSUME)
    hours = 3 * 365 * 24
    assert found.drives_usd == pytest.approx(3 * 146 * 11.1)
    assert found.drives_energy_usd == pytest.approx(0.06 * hours * 0.12 * 1.3)
    assert found.gpu_total_usd == pytest.approx(10_000 + 0.25 * hours * 0.12 * 1.3)
    assert found.share == pytest.approx(found.drives_total_usd / found.gpu_total_usd)
    assert found.usd_per_pb == pytest.approx(11.1 / 2.5)
    # Drives that wear out earlier are bought again.
    long = 2.5 * drives.lifespan_years
    worn = cost_of_drives(FOUND, drives, long, ASSUME)
    again = worn.drives_total_usd - worn.drives_energy_usd
    assert again == pytest.approx(2.5 * found.drives_usd)
    unpriced = replace(FOUND.case.gpu, price_usd=None)
    other = replace(FOUND, case=replace(FOUND.case, gpu=unpriced))
    assert cost_of_drives(other, drives, 3.0, ASSUME).share is None


def test_what_cannot_be_asked() -> None:
    ssd = SSDS[0]
    with pytest.raises(ConfigError, match="drives"):
        wear(FOUND, ssd, 0, ASSUME)
    with pytest.raises(ConfigError, match="years"):
        fewest(FOUND, ssd, 0.0, ASSUME)
    with pytest.raises(ConfigError, match="years"):
        cost_of_drives(
            FOUND, wear(FOUND, ssd, 1, ASSUME), math.copysign(0.0, -1), ASSUME
        )
