"""The token file: every text once through the tokenizer, then memory-mapped."""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ssdtrain.errors import ConfigError
from ssdtrain.train.data.sources import documents, source_files
from ssdtrain.train.data.vocabulary import Vocabulary
from ssdtrain.train.settings import DataSettings

TOKEN_DTYPE = np.dtype("<u4")
"""Four bytes an id: any tokenizer fits, and no second format exists."""
_FORMAT = 1
SCANNED_TOKENS = 1 << 24
"""At once, when a token file is checked."""


def token_file(settings: DataSettings, vocabulary: Vocabulary) -> NDArray[np.uint32]:
    """Return the tokens of `settings`, uint32 [num_tokens], memory-mapped, read-only;
    the first process makes the file. Raises ConfigError: no source file matches, or a
    JSON line lacks its field."""
    files = source_files(settings)
    directory = Path(settings.cache_directory).expanduser()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"data.cache_directory={directory} cannot be made ({error.strerror}); set "
            "it to a place that you can write to."
        ) from error
    path = directory / f"tokens-{_digest(files, settings, vocabulary)}.u32"
    with _lock(path.with_suffix(".lock")):
        if not _is_whole(path, vocabulary):
            texts = documents(files, settings)
            _write(path, _limited(texts, settings.max_bytes), vocabulary)
    if path.stat().st_size == 0:
        raise ConfigError(f"data.files: no text in {', '.join(map(str, files[:3]))}")
    return np.memmap(path, dtype=TOKEN_DTYPE, mode="r")


def check_length(tokens: NDArray[np.uint32], window: int) -> None:
    """Raise ConfigError unless one window of `window` tokens fits."""
    if len(tokens) < window:
        raise ConfigError(
            f"the text holds {len(tokens)} tokens, one sequence needs {window}; give "
            "more text or lower model.sequence_length."
        )


def _digest(files: list[Path], settings: DataSettings, vocabulary: Vocabulary) -> str:
    facts = [
        (str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns)
        for path in files
    ]
    what = [_FORMAT, facts, settings.field, settings.max_bytes, vocabulary.encoder.name]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _is_whole(path: Path, vocabulary: Vocabulary) -> bool:
    """Return whether the file is there and holds ids of the vocabulary: one that does
    not would fail in the middle of training. A damaged one is made again."""
    num_bytes = path.stat().st_size if path.exists() else 0
    if num_bytes == 0 or num_bytes % TOKEN_DTYPE.itemsize:
        return False
    tokens = np.memmap(path, dtype=TOKEN_DTYPE, mode="r")
    parts = range(0, len(tokens), SCANNED_TOKENS)
    most = max(int(tokens[at : at + SCANNED_TOKENS].max()) for at in parts)
    return most <= vocabulary.end_id


def _limited(texts: Iterable[str], max_bytes: int | None) -> Iterator[str]:
    left = max_bytes
    for text in texts:
        if left is None:
            yield text
            continue
        if left <= 0:
            return
        raw = text.encode("utf-8")[:left]
        left -= len(raw)
        yield raw.decode("utf-8", errors="ignore")


def _write(path: Path, texts: Iterable[str], vocabulary: Vocabulary) -> None:
    # Under another name first: a killed run leaves no half-written token file.
    partial = path.with_suffix(".partial")
    with partial.open("wb") as out:
        for text in texts:
            ids = vocabulary.encoder.encode(text)
            out.write(np.append(ids, vocabulary.end_id).astype(TOKEN_DTYPE).tobytes())
    os.replace(partial, path)
