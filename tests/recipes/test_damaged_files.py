"""Every reader meets damaged files: a clear error, or a valid load that is used."""

from pathlib import Path

import pytest

from recipes.bench.safety.damaged_files import verdict
from recipes.bench.safety.readers import READERS, Reader

NUM_FILES = 12
"""Of each kind here; recipes/bench/safety/damaged_files.py does ten thousand."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_damaged_files_are_refused_clearly(reader: Reader, tmp_path: Path) -> None:
    for seed in range(NUM_FILES):
        place = tmp_path / str(seed)
        place.mkdir(mode=0o700)
        assert verdict(reader, seed, place) is None


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_whole_files_are_read(reader: Reader, tmp_path: Path) -> None:
    reader.read(reader.make(tmp_path))
