"""The source's figures, tables and prices: what the model reproduces, and what not.

Each claim that fails is a test too: docs/project.md repeats the arithmetic.
"""

import re
from pathlib import Path

import pytest

from ssdtrain.tools.project.assumptions import Assumptions
from ssdtrain.tools.project.cases import (
    GIB,
    TABLE_5_4,
    CaseSet,
    cases,
    implied_tflops,
    table_5_5,
)
from ssdtrain.tools.project.endurance import wear
from ssdtrain.tools.project.model import Projection, project
from ssdtrain.tools.project.tables import GPUS, SSDS, find_row

ASSUME = Assumptions()
A100 = find_row(GPUS, "a100-pcie", "GPU")
P5620 = find_row(SSDS, "d7-p5620", "SSD")


@pytest.fixture(scope="module")
def figure() -> list[Projection]:
    return [project(case, ASSUME) for case in cases(CaseSet.FIGURE_5_10)]


def test_figure_5_10_every_case_lasts_over_three_years(
    figure: list[Projection],
) -> None:
    years = [wear(found, P5620, 4, ASSUME).lifespan_years for found in figure]
    assert len(years) == 12
    assert min(years) > 3.0


def test_figure_5_13_needs_both_retention_and_amplification(
    figure: list[Projection],
) -> None:
    drive = find_row(SSDS, "980-pro", "SSD")
    relaxed = ASSUME.changed(["retention_factor=86"])
    years = [wear(found, drive, 4, relaxed).lifespan_years for found in figure]
    assert min(years) > 2.0
    # Retention alone does not do it, amplification alone still less.
    alone = relaxed.changed(["rated_write_amplification=1"])
    assert 1.0 < min(wear(f, drive, 4, alone).lifespan_years for f in figure) < 2.0
    assert min(wear(f, drive, 4, ASSUME).lifespan_years for f in figure) < 0.1


def test_table_5_4_model_estimates_within_5_per_cent() -> None:
    for case, row in zip(cases(CaseSet.TABLE_5_4), TABLE_5_4, strict=True):
        estimate = project(case, ASSUME).activation_bytes / GIB
        assert estimate == pytest.approx(row.estimate_gib, rel=0.05)
        assert estimate == pytest.approx(row.offloaded_gib, rel=0.07)


def test_table_5_4_bandwidth() -> None:
    for case, row in zip(cases(CaseSet.TABLE_5_4), TABLE_5_4, strict=True):
        found = project(case, ASSUME)
        assert found.write_gb_per_s == pytest.approx(row.write_gb_per_s, rel=0.06)
        assert 120 < implied_tflops(row) < 140


def groups(which: tuple[Projection, ...]) -> list[list[float]]:
    """Required GB/s of Table 5.5: one list of six scales for each hidden size."""
    rates = [found.write_gb_per_s for found in which]
    return [rates[start : start + 6] for start in range(0, len(rates), 6)]


def test_table_5_5_needs_sequence_parallelism() -> None:
    """Without it tensor parallelism raises the bandwidth: 10 of 34 bytes stay whole."""
    plain = table_5_5(A100, sequence_parallel=False)
    by_hidden = groups(tuple(project(case, ASSUME) for case in plain))
    for rates in by_hidden:
        assert rates[2] > rates[1], "TP 8 needs more than TP 4"
    assert by_hidden[0][2] < 18.0
    assert by_hidden[1][2] > 13.8 and by_hidden[2][2] > 8.76


def test_the_page_shows_these_figures(figure: list[Projection]) -> None:
    """docs/project.md's table of Figures 5.10 and 5.13, cell by cell."""
    page = (Path(__file__).resolve().parents[4] / "docs/project.md").read_text()
    section = page.split("## Figure 5.10 and 5.13")[1].split("Reproduced:")[0]
    lines = [line for line in section.splitlines() if re.match(r"\| \d", line)]
    relaxed = ASSUME.changed(["retention_factor=86"])
    for line, found in zip(lines, figure, strict=True):
        client = wear(found, find_row(SSDS, "980-pro", "SSD"), 4, relaxed)
        expected = [
            f"{found.write_gb_per_s:.1f}",
            f"{wear(found, P5620, 4, ASSUME).lifespan_years:.1f}",
            f"{client.lifespan_years:.1f}",
            f"{found.largest_micro_batch_power_of_two} ({found.largest_micro_batch})",
            f"{found.power_of_two_in_flight_bytes / 1e12:.2f} "
            f"({found.largest_in_flight_bytes / 1e12:.2f})",
        ]
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[0].startswith(str(found.case.gpus))
        assert cells[1:] == expected


def test_other_gpus_scale_the_throughput() -> None:
    h200 = find_row(GPUS, "h200-sxm", "GPU")
    for ours, theirs in zip(
        cases(CaseSet.FIGURE_5_10, h200), cases(CaseSet.FIGURE_5_10), strict=True
    ):
        assert ours.tflops is not None and theirs.tflops is not None
        assert ours.tflops / theirs.tflops == pytest.approx(989 / 312)
