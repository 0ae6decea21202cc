"""Which text is read: plain files, JSON lines, or Python's own sources."""

import glob
import itertools
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from ssdtrain.errors import ConfigError
from ssdtrain.train.settings import DataSettings

JSON_LINES = ".jsonl"
MOST_FILES = 100_000
"""What one entry of `data.files` may match; more is rather a wrong directory."""
_LEAVE_OUT = "leave it out, for instance by a glob pattern such as 'texts/*.txt'."
_LOOKED_AT = 4096
"""Bytes of each file: no text holds a NUL there, most other files do."""


def source_files(settings: DataSettings) -> list[Path]:
    """Return the files that `settings` name, in a fixed order; the standard library's
    modules when none is named. Raises ConfigError: nothing matches, or more than
    `MOST_FILES`; a file cannot be read, or is no text."""
    if not settings.files:
        root = Path(sysconfig.get_path("stdlib"))
        skipped = {"site-packages", "dist-packages", "__pycache__"}
        found = sorted(
            path
            for path in root.rglob("*.py")
            if not skipped & set(path.relative_to(root).parts)
        )
    else:
        found = [path for name in settings.files for path in _matches(name)]
        for path in found:
            _check_text(path)
    if not found:
        raise ConfigError(
            f"data.files={list(settings.files)} matches no file; name text files, "
            "*.jsonl files, directories or glob patterns."
        )
    return found


def _matches(name: str) -> list[Path]:
    path = Path(name).expanduser()
    inside = path.rglob("*") if path.is_dir() else map(Path, glob.iglob(str(path)))
    found = list(itertools.islice((p for p in inside if p.is_file()), MOST_FILES + 1))
    if len(found) > MOST_FILES:
        raise ConfigError(
            f"data.files: {name} expects at most {MOST_FILES:,} files, got more; name "
            "a directory of nothing but text, or a pattern such as 'texts/*.txt'."
        )
    return sorted(found)


def _check_text(path: Path) -> None:
    try:
        with path.open("rb") as file:
            head = file.read(_LOOKED_AT)
    except OSError as error:
        raise _unreadable(path, error) from error
    if b"\0" in head:
        raise ConfigError(
            f"data.files: {path} expects UTF-8 text, got NUL bytes; {_LEAVE_OUT}"
        )


def _unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"data.files: {path} cannot be read ({error.strerror}); {_LEAVE_OUT}"
    )


def documents(files: list[Path], settings: DataSettings) -> Iterator[str]:
    """Yield a text for each plain file and each JSON line. Raises ConfigError, with
    file and line: a file cannot be read, or a JSON line lacks the field."""
    for path in files:
        try:
            if path.suffix == JSON_LINES:
                yield from _json_lines(path, settings.field)
            else:
                yield path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise _unreadable(path, error) from error


def _json_lines(path: Path, field: str) -> Iterator[str]:
    # As for plain text, bytes that are not UTF-8 are replaced.
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                text = str(json.loads(line)[field])
            except (ValueError, LookupError, TypeError, RecursionError) as error:
                raise ConfigError(
                    f"{path}:{number} expects a JSON object with the key {field!r} "
                    f"({type(error).__name__}: {error}); set data.field."
                ) from None
            # Half a surrogate pair is a character to JSON, and none to UTF-8.
            yield text.encode("utf-8", errors="replace").decode("utf-8")
