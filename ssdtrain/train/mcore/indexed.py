"""Megatron's indexed datasets as a stream of tokens: `name.bin` holds documents one
after the other, `name.idx` the type of a token."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssdtrain.errors import ConfigError
from ssdtrain.train.settings import DataSettings


def prefix_of(settings: DataSettings) -> Path | None:
    """Return the dataset that `data.files` names, with or without its suffix; None:
    text. Raises ConfigError: it is named next to other files, or half of it is
    missing."""
    found = []
    for name in settings.files:
        path = Path(name).expanduser()
        if path.suffix in (".bin", ".idx"):
            path = path.with_suffix("")
        parts = [path.with_name(path.name + suffix) for suffix in (".bin", ".idx")]
        there = [part.is_file() for part in parts]
        if all(there):
            found.append(path)
        elif any(there):
            missing = parts[there.index(False)]
            raise ConfigError(f"an indexed dataset needs both files, {missing} is not")
    if found and len(settings.files) > 1:
        raise ConfigError(
            "data.files expects one indexed dataset alone, got "
            f"{', '.join(settings.files)}; merge them with Megatron's tools first."
        )
    return found[0] if found else None


def tokens_of(prefix: Path) -> NDArray[Any]:
    """Return all tokens, an integer type [num_tokens], memory-mapped and read-only."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dtype = IndexedDataset(str(prefix)).index.dtype
    return np.memmap(prefix.with_name(prefix.name + ".bin"), dtype=dtype, mode="r")
