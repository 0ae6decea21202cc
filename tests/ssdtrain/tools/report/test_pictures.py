"""The memory picture is drawn from courses, and is a picture."""

from pathlib import Path

import pytest

from ssdtrain.tools.report.pictures import memory_lines, write_memory

pytest.importorskip("matplotlib")


def test_a_peak_is_the_exact_one_or_the_highest_sample() -> None:
    courses = {"one": [(0.0, 5), (1.0, 9e6), (2.0, 1)], "none": []}
    one, none = memory_lines(courses, {})
    assert one.name == "one, peak 9.00 MB" and one.level == 9.0
    assert none.level == 0.0 and not none.points
    [exact, _] = memory_lines(courses, {"one": 9.5e6})
    assert exact.name == "one, peak 9.50 MB" and exact.level == 9.5


def test_draws_a_png_without_a_display(tmp_path: Path) -> None:
    courses = {"without": [(0.0, 10), (5.0, 10**7)], "with": [(0.0, 3), (4.0, 10**6)]}
    exact = {"without": 10**7, "with": 1.25e6}
    title = "step 3, rank 1"
    write_memory(courses, exact, "saved tensors", tmp_path / "memory.png", title)
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    path = tmp_path / "memory.svg"
    write_memory(courses, exact, "saved tensors", path, title)
    drawing = path.read_text()
    assert "peak 10.00 MB" in drawing and "peak 1.25 MB" in drawing
    assert title in drawing and "saved tensors (MB)" in drawing
