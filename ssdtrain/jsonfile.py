"""Versioned JSON files: written whole, read into typed values or refused at once.

[Note: damaged files]
A file may hold anything: half of its bytes, a number too large for a double, a list
where a mapping belongs, ten thousand brackets. So nothing computes with what was read
before `decode` has compared it with the annotations of the dataclass that it becomes:
each field has its declared type, numbers are finite and within `LARGEST`, and within
the bounds of their annotation (`Natural`, `Positive`). The error names the file, the
field, what was expected and what came.
(tests/ssdtrain/test_jsonfile.py, recipes/bench/safety)
"""

import functools
import json
import math
import os
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Generic,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from ssdtrain.errors import DamagedFileError

T = TypeVar("T")

LARGEST = 2**63 - 1
"""Of any number: bytes, steps and times in use are far below it."""
MOST_BYTES = 1 << 30
"""Of a file: the largest profile seen has two million."""
SHOWN = 60
"""Characters of a wrong value in an error."""


class Bounds(NamedTuple):
    """What a number must lie between, both ends included."""

    least: float
    most: float = LARGEST


Natural = Annotated[int, Bounds(0)]
"""A count, or bytes."""
Index = Annotated[int, Bounds(-1)]
"""A position; -1: none."""
Duration = Annotated[float, Bounds(0.0, 1e15)]
"""A time, in whatever unit; a thousand years of milliseconds at most."""
Fraction = Annotated[float, Bounds(0.0, 1e6)]
"""A share that may exceed 1."""
Positive = Annotated[float, Bounds(1e-9, 1e18)]
"""A rate."""


@dataclass(frozen=True, kw_only=True)
class Format(Generic[T]):
    """One kind of file: a dataclass, and what to tell the user of a damaged one."""

    kind: type[T]
    schema: str
    version: int
    what: str
    """`a plan`."""
    remedy: str
    """`make it again with ...`."""
    check: Callable[[T], None] = lambda _: None
    """Raises `Unfit` for what the annotations cannot say."""

    def to_json(self, value: T) -> dict[str, Any]:
        """Plain values, with the schema's name and version."""
        head = {"schema": self.schema, "schema_version": self.version}
        return {**head, **json.loads(dumps(value))}

    def from_json(self, values: object, source: str = "") -> T:
        """What `to_json` made, perhaps edited.

        Args:
            source: the file's name, for the error.

        Raises:
            DamagedFileError: another schema or version, or a field that is missing,
                unknown or wrong.
        """
        try:
            plain = self._checked(values)
            value: T = decode(self.kind, plain)
            self.check(value)
        except Unfit as error:
            raise error.of_file(source or self.what, self.what, self.remedy) from None
        return value

    def read(self, path: str | Path) -> T:
        """Read a file.

        Raises:
            DamagedFileError: not JSON, or see `from_json`.
            OSError: it cannot be read.
        """
        return self.from_json(load_json(path, self.what, self.remedy), str(path))

    def write(self, path: str | Path, value: T) -> None:
        """Write a file; readers see the old one or the new one, never half.

        Raises:
            OSError: it cannot be written.
        """
        write_json(path, self.to_json(value))

    def _checked(self, values: object) -> dict[str, Any]:
        if not isinstance(values, Mapping):
            raise Unfit("", "a mapping", values)
        plain = dict(values)
        schema, version = plain.pop("schema", None), plain.pop("schema_version", None)
        if schema != self.schema:
            raise Unfit("schema", repr(self.schema), schema)
        if version != self.version or isinstance(version, bool):
            raise Unfit("schema_version", f"version {self.version}", version)
        return plain


class Unfit(Exception):
    """A value is not what its field expects; `Format` adds the file's name."""

    def __init__(self, where: str, expected: str, got: object) -> None:
        super().__init__(where, expected, got)
        self.where = where
        self.expected = expected
        self.got = got

    def inside(self, outer: str) -> "Unfit":
        """The same, where the value is a part of another one."""
        dot = "." if outer and self.where and self.where[0] != "[" else ""
        return Unfit(f"{outer}{dot}{self.where}", self.expected, self.got)

    def of_file(self, source: str, what: str, remedy: str) -> DamagedFileError:
        """The same for the user."""
        return DamagedFileError(
            f"{source}: {what} is damaged at {self.where or 'its top'}: expected "
            f"{self.expected}, "
            f"got {_shown(self.got)}; {remedy}."
        )


def load_json(path: str | Path, what: str, remedy: str) -> Any:
    """Parse a file that may hold anything.

    Raises:
        DamagedFileError: too large, not UTF-8, not JSON, or nested too deeply.
        OSError: the file cannot be read.
    """
    with Path(path).open("rb") as file:
        raw = file.read(MOST_BYTES + 1)
    if len(raw) > MOST_BYTES:
        raise DamagedFileError(
            f"{path}: expected {what} of {MOST_BYTES} bytes at most, got more; "
            f"{remedy}."
        )
    try:
        return json.loads(raw.decode("utf-8"))
    except RecursionError:
        why = "it is nested too deeply"
    except ValueError as error:  # not UTF-8, not JSON, a number of 4,300 digits
        why = str(error)
    raise DamagedFileError(f"{path}: expected {what} as JSON, but {why}; {remedy}.")


def load_as(kind: Any, path: str | Path, what: str) -> Any:
    """Parse a file without schema or version into values of type `kind`.

    Raises:
        DamagedFileError: see `load_json`, or the values are of another type.
        OSError: the file cannot be read.
    """
    remedy = "remove it"
    try:
        return decode(kind, load_json(path, what, remedy))
    except Unfit as error:
        raise error.of_file(str(path), what, remedy) from None


def write_json(path: str | Path, values: object) -> None:
    """Write a file next to it and rename it.

    Raises:
        OSError: the file cannot be written.
    """
    path = Path(path)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        draft.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def dumps(value: object) -> str:
    """Return JSON text of a dataclass: a mapping of its fields; an enum is its text, or
    its name. `decode(kind, json.loads(text))` reads it."""
    return json.dumps(value, default=_plain_of)  # by the C encoder


def _plain_of(value: Any) -> Any:
    if isinstance(value, Enum):
        return _text_of(value)
    return {name: getattr(value, name) for name in _names(type(value))}  # type: ignore[arg-type]


@functools.cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def _text_of(member: Enum) -> str:
    return str(member.value) if isinstance(member, str) else member.name.lower()


def decode(kind: Any, value: object, where: str = "") -> Any:
    """What `dumps` made of a value of type `kind`; see [Note: damaged files].

    Args:
        kind: an annotation: a dataclass, an enum, int, float, str, bool, Any, a
            variadic tuple, a mapping from str, or one of these or None.
        where: path of the value in its file, for errors.

    Raises:
        Unfit: the value is of another type, out of bounds, or incomplete.
    """
    try:
        return _reader(kind)(value)
    except Unfit as error:
        raise error.inside(where) from None


Reader = Callable[[Any], Any]
"""Takes a plain value; raises `Unfit` with the path inside of that value."""


@functools.cache
def _reader(kind: Any) -> Reader:
    """Annotations are looked at once: a profile has a hundred thousand fields."""
    if kind is Any:
        return lambda value: value
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _bounded(_reader(arguments[0]), arguments[1])
    if origin in (Union, types.UnionType):
        (one,) = (_reader(each) for each in arguments if each is not type(None))
        return lambda value: None if value is None else one(value)
    if origin is tuple:
        return _sequence(_reader(arguments[0]))
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(*map(_reader, arguments))
    if is_dataclass(kind):
        return _dataclass(kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _member(kind)
    return functools.partial(_plain, kind)


def _plain(kind: type, value: object) -> Any:
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not -LARGEST <= value <= LARGEST or math.isnan(value):
            raise Unfit("", "a finite number", value)
        return float(value)
    if kind is int and isinstance(value, int) and not isinstance(value, bool):
        if not -LARGEST <= value <= LARGEST:
            raise Unfit("", "a number of 63 bits", value)
        return value
    if kind in (str, bool) and isinstance(value, kind):
        return value
    names = {float: "a number", int: "an integer", str: "a text", bool: "true or false"}
    raise Unfit("", names[kind], value)


def _bounded(one: Reader, bounds: Bounds) -> Reader:
    def read(value: object) -> Any:
        found = one(value)
        if not bounds.least <= found <= bounds.most:
            raise Unfit("", f"{bounds.least:g} to {bounds.most:g}", found)
        return found

    return read


def _sequence(one: Reader) -> Reader:
    def read(value: object) -> Any:
        if not isinstance(value, list | tuple):
            raise Unfit("", "a list", value)
        found: list[Any] = []
        try:
            found.extend(map(one, value))
        except Unfit as error:
            raise error.inside(f"[{len(found)}]") from None
        return tuple(found)

    return read


def _mapping(of_key: Reader, of_value: Reader) -> Reader:
    def read(value: object) -> Any:
        if not isinstance(value, Mapping):
            raise Unfit("", "a mapping", value)
        found = {}
        for key, one in value.items():
            try:
                found[of_key(key)] = of_value(one)
            except Unfit as error:
                raise error.inside(str(key)) from None
        return found

    return read


def _member(kind: type[Enum]) -> Reader:
    known = {_text_of(member): member for member in kind}

    def read(value: object) -> Any:
        if isinstance(value, kind):
            return value
        if not isinstance(value, str) or value not in known:
            raise Unfit("", " or ".join(map(repr, known)), value)
        return known[value]

    return read


def _dataclass(kind: Any) -> Reader:
    annotations = get_type_hints(kind, include_extras=True)
    own = {field.name: _reader(annotations[field.name]) for field in fields(kind)}
    needed = [
        field.name
        for field in fields(kind)
        if field.default is MISSING and field.default_factory is MISSING
    ]

    def read(value: object) -> Any:
        if not isinstance(value, Mapping):
            raise Unfit("", "a mapping", value)
        found = {}
        for name, one in value.items():
            if name not in own:
                raise Unfit(name, f"one of {', '.join(own)}", one)
            try:
                found[name] = own[name](one)
            except Unfit as error:
                raise error.inside(name) from None
        for name in needed:
            if name not in found:
                raise Unfit(name, "a value", None)
        return kind(**found)

    return read


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of more than 4,300 digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."
