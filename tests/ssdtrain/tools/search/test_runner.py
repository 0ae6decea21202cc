"""Found plans run on four ranks, and refuse what they were not made for."""

from pathlib import Path

from tests.ranks import run_ranks

HERE = Path(__file__).parent


def test_losses_of_four_ranks(tmp_path: Path) -> None:
    """To float64's rounding: reductions add in another order."""
    done = tmp_path / "done"
    run_ranks([HERE / "planned_ranks.py", done], tmp_path, num_ranks=4)
    assert done.exists()
