"""Published throughputs by layout: the order that the search gives them.

All thirteen tables, those with lower correlations as well, stand in docs/search.md:
`python -m tests.ssdtrain.tools.search.published`.
"""

import pytest

from tests.ssdtrain.tools.search.published import (
    compared,
    groups,
    rank_correlation,
    ranks,
)

LEAST = 0.7
CHECKED = ("Llama 3.1 405B, table 6", "Llama 13B, 8k")


def test_ranks_of_equal_values_are_equal() -> None:
    assert ranks([3.0, 1.0, 3.0, 2.0]) == [2.5, 0.0, 2.5, 1.0]


def test_the_tables_are_whole() -> None:
    """Each names its source; its layouts use its GPUs, and none stands twice."""
    for group in groups():
        assert group["source"].startswith("https://github.com/")
        assert len(group["rows"]) >= 4
        places = [{**row, "seconds": 0} for row in group["rows"]]
        assert all(places.count(place) == 1 for place in places)
        for row in group["rows"]:
            used = row["data"] * row["tensor"] * row["pipeline"] * row.get("context", 1)
            assert used == group["gpus"]
            assert row["batch"] % (row["data"] * row["sequences"]) == 0


@pytest.mark.parametrize("name", CHECKED)
def test_layouts_are_in_the_published_order(name: str) -> None:
    [group] = [each for each in groups() if each["name"] == name]
    assert rank_correlation(compared(group)) >= LEAST
