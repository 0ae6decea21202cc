"""Values are compared with the annotations before anybody computes with them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any

import pytest

from ssdtrain.errors import DamagedFileError
from ssdtrain.jsonfile import (
    LARGEST,
    Duration,
    Format,
    Index,
    Natural,
    Unfit,
    decode,
    load_as,
)


class Colour(Enum):
    RED = auto()


class Side(str, Enum):
    LEFT = "left"


@dataclass(frozen=True, kw_only=True)
class Inner:
    count: Natural
    at: Index = -1


@dataclass(frozen=True, kw_only=True)
class Outer:
    inner: tuple[Inner, ...]
    by_name: Mapping[str, Duration]
    colour: Colour = Colour.RED
    side: Side = Side.LEFT
    maybe: str | None = None
    flag: bool = False
    anything: Any = None


def positive(value: Outer) -> None:
    if not value.inner:
        raise Unfit("inner", "at least one", [])


FILE = Format(
    kind=Outer,
    schema="test",
    version=2,
    what="a test file",
    remedy="write it again",
    check=positive,
)
WHOLE = Outer(inner=(Inner(count=3),), by_name={"a": 0.5})


def test_what_is_written_is_read(tmp_path: Path) -> None:
    FILE.write(tmp_path / "f.json", WHOLE)
    assert FILE.read(tmp_path / "f.json") == WHOLE
    assert [p.name for p in tmp_path.iterdir()] == ["f.json"]


@pytest.mark.parametrize(
    ("change", "where", "expected"),
    [
        ({"inner": [{"count": -1}]}, "inner[0].count", "0 to"),
        ({"inner": [{"count": 1.5}]}, "inner[0].count", "an integer"),
        ({"inner": [{"count": True}]}, "inner[0].count", "an integer"),
        ({"inner": [{"count": 10**400}]}, "inner[0].count", "63 bits"),
        ({"inner": [{"count": 1, "at": -2}]}, "inner[0].at", "-1 to"),
        ({"inner": [{}]}, "inner[0].count", "a value"),
        ({"inner": {"count": 1}}, "inner", "a list"),
        ({"inner": []}, "inner", "at least one"),
        ({"by_name": {"a": float("nan")}}, "by_name.a", "a finite number"),
        ({"by_name": {"a": float("inf")}}, "by_name.a", "a finite number"),
        ({"by_name": {"a": "x"}}, "by_name.a", "a number"),
        ({"by_name": []}, "by_name", "a mapping"),
        ({"colour": "green"}, "colour", "'red'"),
        ({"side": 3}, "side", "'left'"),
        ({"maybe": 3}, "maybe", "a text"),
        ({"flag": 1}, "flag", "true or false"),
        ({"more": 1}, "more", "one of inner, by_name"),
        ({"schema": "other"}, "schema", "'test'"),
        ({"schema_version": 3}, "schema_version", "version 2"),
        ({"schema_version": True}, "schema_version", "version 2"),
    ],
)
def test_the_error_names_file_field_and_values(
    tmp_path: Path, change: dict[str, Any], where: str, expected: str
) -> None:
    path = tmp_path / "f.json"
    values = json.dumps({**FILE.to_json(WHOLE), **change})
    path.write_text(values)
    with pytest.raises(DamagedFileError) as caught:
        FILE.read(path)
    text = str(caught.value)
    assert str(path) in text and f"at {where}: expected " in text and expected in text
    assert text.endswith("write it again.")


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[" * 100_000, b"\xff\xfe", b"1" * 5000, b"null", b'"text"', b"\x00"],
)
def test_content_that_is_no_such_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "f.json"
    path.write_bytes(content)
    with pytest.raises(DamagedFileError, match=r"f\.json.*write it again"):
        FILE.read(path)


def test_whole_numbers_are_numbers() -> None:
    assert decode(float, 3) == 3.0
    assert decode(int, LARGEST) == LARGEST


def test_files_without_schema(tmp_path: Path) -> None:
    (tmp_path / "f.json").write_text('{"a": 1}')
    assert load_as(dict[str, Natural], tmp_path / "f.json", "a log") == {"a": 1}
    (tmp_path / "f.json").write_text('{"a": -1}')
    with pytest.raises(DamagedFileError, match=r"a log is damaged at a: expected 0"):
        load_as(dict[str, Natural], tmp_path / "f.json", "a log")
