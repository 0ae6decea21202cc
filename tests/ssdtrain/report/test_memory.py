"""The memory picture is drawn from courses, and is a picture."""

from pathlib import Path

import pytest

from ssdtrain.report.memory import draw, peak_bytes

pytest.importorskip("matplotlib")


def test_peak() -> None:
    assert peak_bytes([(0.0, 5), (1.0, 9), (2.0, 1)]) == 9
    assert peak_bytes([]) == 0


def test_draws_a_png_without_a_display(tmp_path: Path) -> None:
    courses = {"without": [(0.0, 10), (5.0, 10**7)], "with": [(0.0, 3), (4.0, 10**6)]}
    draw(courses, "saved tensors", tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    draw(courses, "saved tensors", tmp_path / "memory.svg")
    drawing = (tmp_path / "memory.svg").read_text()
    assert "peak 10.0 MB" in drawing
    assert "peak 1.0 MB" in drawing
