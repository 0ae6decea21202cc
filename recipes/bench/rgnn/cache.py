"""Compiled kernels in one file, so that a run on a bare machine starts warm.

Of Triton's cache the binaries and what a launch needs to know are kept; the stages in
between, nine tenths of it, are not. Entries are found again by content: the same
kernel text, Triton, assembler and device kind.
"""

import io
import json
import os
import tarfile
from pathlib import Path

GROUP = "__grp__"
LIMIT_BYTES = 15 * 2**20
"""Of the packed file."""


def use(directory: Path) -> None:
    """Triton's cache of this process and its children."""
    directory.mkdir(parents=True, exist_ok=True)
    os.environ["TRITON_CACHE_DIR"] = str(directory)


def pack(
    directory: Path, path: Path, limit_bytes: int = LIMIT_BYTES
) -> tuple[int, int]:
    """Writes the cache in `directory` to `path`; (kernels packed, kernels left out
    because the file would grow over `limit_bytes`)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    packed = left_out = 0
    with open(partial, "wb") as raw, tarfile.open(fileobj=raw, mode="w:gz") as tar:
        for entry in sorted(p.parent for p in directory.glob(f"*/{GROUP}*.json")):
            if raw.tell() > limit_bytes:
                left_out += 1
                continue
            for file in _needed(entry):
                tar.add(file, arcname=f"{entry.name}/{file.name}")
            packed += 1
    partial.replace(path)
    return packed, left_out


def _needed(entry: Path) -> list[Path]:
    """Binary and description; the list of an entry's files is written on unpacking."""
    return [
        f
        for f in sorted(entry.iterdir())
        if f.suffix in (".cubin", ".hsaco")
        or (f.suffix == ".json" and not f.name.startswith(GROUP))
    ]


def unpack(path: Path, directory: Path) -> int:
    """Fills `directory` from a packed cache; kernels found there."""
    entries: dict[str, dict[str, str]] = {}
    with tarfile.open(path, "r:gz") as tar:
        for member in tar:
            key, _, name = member.name.partition("/")
            content = tar.extractfile(member)
            plain = content is not None and "/" not in name and key not in ("", "..")
            if not plain or name in ("", ".."):
                raise ValueError(f"{path}: no packed kernel cache: {member.name!r}")
            place = directory / key / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes((content or io.BytesIO()).read())
            entries.setdefault(key, {})[name] = str(place)
    for key, files in entries.items():
        described = next(n for n in files if n.endswith(".json"))
        text = json.dumps({"child_paths": files})
        (directory / key / f"{GROUP}{described}").write_text(text)
    return len(entries)
