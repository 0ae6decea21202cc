"""Which text is read: plain files, JSON lines, or Python's own sources."""

import glob
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from ssdtrain.errors import ConfigError
from ssdtrain.train.settings import DataSettings

JSON_LINES = ".jsonl"


def source_files(settings: DataSettings) -> list[Path]:
    """Return the files that `settings` name, in an order that does not depend on the
    file system; the standard library's modules when none is named.

    Raises:
        ConfigError: nothing matches.
    """
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
    if not found:
        raise ConfigError(
            f"data.files={list(settings.files)} matches no file; name text files, "
            "*.jsonl files, directories or glob patterns."
        )
    return found


def _matches(name: str) -> list[Path]:
    path = Path(name).expanduser()
    if path.is_dir():
        return sorted(p for p in path.rglob("*") if p.is_file())
    return sorted(p for p in map(Path, glob.glob(str(path))) if p.is_file())


def documents(files: list[Path], settings: DataSettings) -> Iterator[str]:
    """Return the texts in `files`, one per plain file and one per JSON line.

    Raises:
        ConfigError: a file cannot be read, or a JSON line lacks the field; file and
            line are named.
    """
    for path in files:
        try:
            if path.suffix == JSON_LINES:
                yield from _json_lines(path, settings.field)
            else:
                yield path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise ConfigError(
                f"data.files: {path} cannot be read ({error.strerror}); leave it out, "
                "for instance by a glob pattern such as 'texts/*.txt'."
            ) from error


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
