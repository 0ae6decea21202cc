"""The memory picture is drawn from courses, and is a picture."""

from pathlib import Path

import pytest

from ssdtrain.tools.report.memory import draw, peak_bytes

pytest.importorskip("matplotlib")


def test_peak() -> None:
    assert peak_bytes([(0.0, 5), (1.0, 9), (2.0, 1)]) == 9
    assert peak_bytes([]) == 0


def test_draws_a_png_without_a_display(tmp_path: Path) -> None:
    courses = {"without": [(0.0, 10), (5.0, 10**7)], "with": [(0.0, 3), (4.0, 10**6)]}
    draw(courses, "saved tensors", tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    # A sampled course may miss the peak; the table's figure is the one that is drawn.
    exact = {"without": 10**7, "with": 1.25e6}
    path = tmp_path / "memory.svg"
    draw(courses, "saved tensors", path, title="step 3, rank 1", peaks=exact)
    drawing = path.read_text()
    assert "peak 10.00 MB" in drawing
    assert "peak 1.25 MB" in drawing
    assert "step 3, rank 1" in drawing
