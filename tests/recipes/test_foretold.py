"""`ssdtrain fits` against rows that were measured on an H100 and an H200."""

import pytest

from recipes.bench.models.foretold import errors, measured

CELLS = [
    ("h100", "qwen3-1.7b/full/8k/eager"),
    ("h200", "qwen3-4b/full/8k/eager"),
    ("h100", "qwen3-8b:20/lora/8k/eager"),
]


@pytest.mark.parametrize(("gpu", "cell"), CELLS)
def test_the_measured_step_and_peak_are_foretold(gpu: str, cell: str) -> None:
    rows = [row for row in measured() if (row.gpu, row.cell) == (gpu, cell)]
    assert {row.column for row in rows} == {"keep", "gc"}
    found = list(errors(rows))
    for row in found:
        assert abs(row["peak_error"]) < 0.03, row
        assert abs(row["step_error"]) < 0.1, row
    by_column = {row["column"]: row["foretold_ms"] for row in found}
    assert by_column["keep"] < by_column["gc"]
