"""Text to ids: raw bytes, or a tokenizer file, with the special ids that the
objectives need placed after the ordinary ones."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ssdtrain.errors import ConfigError, DamagedFileError

NUM_SENTINELS = 100
"""Span corruption marks at most this many spans (as T5 does)."""
ROW_MULTIPLE = 128
"""Embedding rows are rounded up to this (matrix units like it)."""
NUM_BYTE_VALUES = 256


class Encoder(Protocol):
    """Turns a text into ordinary ids."""

    name: str
    num_ids: int

    def encode(self, text: str) -> NDArray[np.int64]:
        """Ids in [0, num_ids)."""


class ByteEncoder:
    """One id for each byte of UTF-8."""

    name = "bytes"
    num_ids = NUM_BYTE_VALUES

    def encode(self, text: str) -> NDArray[np.int64]:
        """Ids in [0, 256)."""
        raw = np.frombuffer(text.encode("utf-8"), dtype=np.uint8)
        return raw.astype(np.int64)


class FileEncoder:
    """A `tokenizer.json` of the `tokenizers` library."""

    def __init__(self, path: str) -> None:
        from tokenizers import Tokenizer

        if not Path(path).is_file():
            raise ConfigError(f"data.tokenizer expects a tokenizer.json, got {path!r}")
        self._path = path
        with self._refusals():
            self._tokenizer = Tokenizer.from_file(path)
        self.num_ids = int(self._tokenizer.get_vocab_size())
        stat = Path(path).stat()
        self.name = f"{Path(path).resolve()}:{stat.st_size}:{stat.st_mtime_ns}"

    def encode(self, text: str) -> NDArray[np.int64]:
        """Ids in [0, num_ids)."""
        with self._refusals():
            found = self._tokenizer.encode(text, add_special_tokens=False).ids
            ids = np.asarray(found, dtype=np.int64)
            if int(ids.max(initial=0)) >= self.num_ids:
                raise ValueError(f"id {ids.max()} of {self.num_ids}")
            return ids

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # what `tokenizers` raises is `Exception` itself
            raise DamagedFileError(
                f"{self._path}: data.tokenizer expects a tokenizer.json of the "
                f"tokenizers library, got one that it refuses ({error}); save it again."
            ) from error


class Vocabulary:
    """The ids of one encoder, [0, n), then end of text, padding, mask, and the
    sentinels."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self.end_id = encoder.num_ids
        self.pad_id = encoder.num_ids + 1
        self.mask_id = encoder.num_ids + 2
        self.first_sentinel_id = encoder.num_ids + 3
        self.num_ids = self.first_sentinel_id + NUM_SENTINELS
        self.num_rows = -(-self.num_ids // ROW_MULTIPLE) * ROW_MULTIPLE

    @classmethod
    def from_tokenizer(cls, path: str | None) -> "Vocabulary":
        """Return the vocabulary of a tokenizer file, or of bytes when `path` is None.
        Raises ConfigError: there is no such file, or it is damaged."""
        return cls(ByteEncoder() if path is None else FileEncoder(path))
