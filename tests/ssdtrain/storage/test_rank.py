"""Every rank its own disk or its own share of the disks."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdtrain.errors import ConfigError
from ssdtrain.storage.rank import Rank, directories_of, rank_of


def test_a_lone_process_takes_all() -> None:
    assert directories_of(["/a", "/b"], Rank()).paths == (Path("/a"), Path("/b"))


def test_its_own_by_name(tmp_path: Path) -> None:
    (tmp_path / "nvme1").mkdir()
    name = str(tmp_path / "nvme{local_rank}")
    assert directories_of([name], Rank(9, 1, 2)).paths == (tmp_path / "nvme1",)
    # A rank without an SSD: host memory, and the report can name the place.
    other = directories_of([name], Rank(8, 0, 2))
    assert other.paths == ()
    assert other.missing == (tmp_path / "nvme0",)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 9), st.integers(1, 9))
def test_shares_cover_all_and_overlap_only_if_they_must(
    num_directories: int, num_ranks: int
) -> None:
    names = [f"/nvme{i}" for i in range(num_directories)]
    shares = [
        directories_of(names, Rank(r, r, num_ranks)).paths for r in range(num_ranks)
    ]
    assert all(shares)
    used = [path for share in shares for path in share]
    assert set(used) == set(map(Path, names))
    if num_directories >= num_ranks:
        assert len(used) == num_directories
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    else:
        assert len(used) == num_ranks


def test_mistakes() -> None:
    with pytest.raises(
        ConfigError, match=r"placeholder that is not known; set \{local"
    ):
        directories_of(["/x{local_rank}{node}"], Rank())
    with pytest.raises(ConfigError, match="LOCAL_RANK expects 0 to 1"):
        directories_of(["/x"], Rank(2, 2, 2))


def test_from_the_environment() -> None:
    assert rank_of({}) == Rank(0, 0, 1)
    launched = {"RANK": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert rank_of(launched) == Rank(5, 1, 4)
    deepspeed = {"RANK": "1", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "WORLD_SIZE": "8"}
    assert rank_of(deepspeed) == Rank(1, 1, 2)
    assert rank_of({"RANK": "3", "WORLD_SIZE": "4"}) == Rank(3, 3, 4)
    assert rank_of({"LOCAL_RANK": "2"}) == Rank(0, 2, 3)
