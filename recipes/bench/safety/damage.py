"""Ways to damage a file: in its bytes, and in the values that they spell."""

import io
import json
import pickle
import random
import zipfile
from pathlib import Path
from typing import Any

STRANGE: list[Any] = [
    None,
    True,
    -1,
    0,
    7,
    2**31,
    2**63,
    10**400,
    -(10**30),
    0.5,
    1e308,
    -1e308,
    float("nan"),
    float("inf"),
    "",
    "nan",
    "\ud800",
    "../../etc",
    "x" * 5000,
    [],
    {},
    [[]],
    [None],
    {"": None},
    {"schema": "ssdtrain-plan"},
]
DEEP = 100_000


def damaged(path: Path, draw: random.Random) -> tuple[str, bytes]:
    """What was done to a file, and its new content."""
    content = path.read_bytes()
    if path.suffix in (".json", ".jsonl") and draw.random() < 0.7:
        return _json(content, draw)
    if path.suffix == ".yaml" and draw.random() < 0.7:
        return _yaml(content, draw)
    if path.suffix in (".pt", ".npz") and draw.random() < 0.5:
        return _archive(content, draw)
    return _bytes(content, draw)


def _bytes(content: bytes, draw: random.Random) -> tuple[str, bytes]:
    size = len(content)
    at = draw.randrange(size + 1)
    length = draw.choice([1, 4, 16, 200, size])
    noise = draw.randbytes(min(length, 4096))
    ways = {
        "cut": content[:at],
        "head lost": content[at:],
        "overwritten": content[:at] + noise + content[at + len(noise) :],
        "inserted": content[:at] + noise + content[at:],
        "deleted": content[:at] + content[at + length :],
        "zeros": content[:at] + bytes(length) + content[at + length :],
        "doubled": content + content[at:],
        "empty": b"",
        "noise": noise,
        "brackets": draw.choice([b"[", b'{"a":', b"{", b"(", b"- "]) * DEEP,
        "bits": _flipped(content, draw),
        "not utf-8": content[:at] + b"\xff\xfe\xc3\x28" + content[at:],
        "nul": content[:at] + b"\x00" + content[at:],
    }
    what = draw.choice(list(ways))
    return what, ways[what]


def _flipped(content: bytes, draw: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(draw.choice([1, 2, 8])):
        if changed:
            changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _json(content: bytes, draw: random.Random) -> tuple[str, bytes]:
    lines = content.decode().splitlines() if b"\n{" in content else [content.decode()]
    try:
        number = draw.randrange(len(lines))
        values = json.loads(lines[number])
    except ValueError:
        values, lines, number = json.loads(content), [""], 0
    what, values = _values(values, draw)
    lines[number] = json.dumps(values)
    return what, "\n".join(lines).encode("utf-8", errors="surrogatepass")


def _yaml(content: bytes, draw: random.Random) -> tuple[str, bytes]:
    import yaml

    what, values = _values(yaml.safe_load(content), draw)
    try:
        text = yaml.safe_dump(values)
    except ValueError:  # an integer of 400 digits has no text
        return _bytes(content, draw)
    return what, text.encode("utf-8", errors="surrogatepass")


def _values(values: Any, draw: random.Random) -> tuple[str, Any]:
    """One change somewhere in a tree of values."""
    places: list[tuple[Any, Any]] = []
    _walk(values, places)
    if not places or draw.random() < 0.03:
        return "top replaced", draw.choice(STRANGE)
    parent, key = draw.choice(places)
    what = draw.choice(["replaced", "dropped", "renamed", "doubled", "swapped"])
    if what == "dropped":
        del parent[key]
    elif what == "renamed" and isinstance(parent, dict):
        parent[f"{key}_"] = parent.pop(key)
    elif what == "doubled" and isinstance(parent, list):
        parent.insert(key, parent[key])
    elif what == "swapped":
        other, its_key = draw.choice(places)
        parent[key], other[its_key] = other[its_key], parent[key]
    else:
        parent[key] = draw.choice(STRANGE)
    # A swap with what contains it would be a circle.
    try:
        json.dumps(values)
    except ValueError:
        return "top replaced", draw.choice(STRANGE)
    return f"value {what}", values


def _walk(values: Any, places: list[tuple[Any, Any]]) -> None:
    if isinstance(values, dict):
        for key, one in values.items():
            places.append((values, key))
            _walk(one, places)
    if isinstance(values, list):
        for number, one in enumerate(values):
            places.append((values, number))
            _walk(one, places)


def _archive(content: bytes, draw: random.Random) -> tuple[str, bytes]:
    """A whole zip with one member lost, emptied, damaged or replaced."""
    source = zipfile.ZipFile(io.BytesIO(content))
    names = source.namelist()
    chosen = draw.choice(names)
    what = draw.choice(["lost", "emptied", "damaged", "replaced", "pickle"])
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as target:
        for name in names:
            member = source.read(name)
            if name == chosen:
                if what == "lost":
                    continue
                member = {
                    "emptied": b"",
                    "damaged": _bytes(member, draw)[1],
                    "replaced": source.read(draw.choice(names)),
                    "pickle": pickle.dumps(draw.choice(STRANGE)),
                }[what]
            target.writestr(name, member)
    return f"member {what}", out.getvalue()
