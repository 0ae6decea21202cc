"""Sizes, fractions and paths as people write them: one parser for Python, YAML and the
command line.

A dataclass declares such a field with `size`, `fraction` or `places`; `parse_fields` in
its `__post_init__` replaces what was given by the parsed value.
"""

import math
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any

from ssdtrain.errors import ConfigError

PARSE = "parse"
"""Key of a field's metadata: the function (name, value) that parses it."""
_SIZE = re.compile(r"([0-9][0-9_]*(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?)\s*([kmgtp]?)(i?b)?")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
LARGEST_SIZE = 1 << 62
_SIZE_EXAMPLES = "bytes such as 1048576, 1e9, '512MB' (10^6) or '8GiB' (2^30)"


@dataclass(frozen=True)
class Share:
    """A part of a memory whose size is known only where the session runs."""

    fraction: float

    def of(self, total_bytes: int) -> int:
        """Bytes of this part of `total_bytes`, at least 1."""
        return max(1, int(self.fraction * total_bytes))

    def __str__(self) -> str:
        return f"{100 * self.fraction:g}%"


def resolved(value: "int | Share | None", total_bytes: Callable[[], int]) -> int | None:
    """Bytes of `value`; `total_bytes()` is asked for where it is a share."""
    return value.of(total_bytes()) if isinstance(value, Share) else value


ABSENT = "-"
"""What stands for a figure that is not there."""
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def bytes_text(num_bytes: float | None) -> str:
    """Write a byte count in decimal units (1 MB = 1,000,000 bytes)."""
    if num_bytes is None:
        return ABSENT
    for size, unit in _UNITS:
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the nearest of `known` in any case, or nothing."""
    by_lower = {name.lower(): name for name in known}
    near = get_close_matches(str(word).lower(), list(by_lower), n=1, cutoff=0.5)
    return f"; did you mean {by_lower[near[0]]!r}?" if near else ""


def parse_size(name: str, value: Any) -> int:
    """Bytes from an integer, a whole float, or text with a unit.

    `KB MB GB TB PB` are powers of 1000, and so are `K M G T P` alone; `KiB MiB GiB TiB
    PiB` are powers of 1024.

    Raises:
        ConfigError: no whole number of bytes; the text names the setting.
    """
    number = math.nan
    if isinstance(value, str):
        found = _SIZE.fullmatch(value.strip().lower())
        if found is not None:
            base = 1024 if found[3] == "ib" else 1000
            number = float(found[1].replace("_", "")) * base ** _POWERS[found[2]]
            number = round(number) if found[2] else number
    elif isinstance(value, int | float) and not isinstance(value, bool):
        number = value
    is_whole = isinstance(number, int) or number.is_integer()
    if not is_whole or number > LARGEST_SIZE:
        raise ConfigError(f"{name} expects {_SIZE_EXAMPLES}, got {value!r}")
    return int(number)


def parse_fraction(name: str, value: Any) -> float:
    """A number from 0 to 1, from a number or a percentage such as `'1%'`.

    Raises:
        ConfigError: neither, or out of range; the text suggests what was meant.
    """
    number = math.nan
    percent = isinstance(value, str) and value.strip().endswith("%")
    try:
        if not isinstance(value, bool):
            number = float(value.strip()[:-1]) if percent else float(value)
    except (TypeError, ValueError):
        pass
    number = number / 100 if percent else number
    if 0 <= number <= 1:
        return number
    meant = ""
    if 1 < number <= 100 and not percent:
        meant = f"; did you mean {number / 100:g} or '{number:g}%'?"
    raise ConfigError(
        f"{name} expects a fraction from 0 to 1 (0.01) or a percentage ('1%'), got "
        f"{value!r}{meant}"
    )


def parse_size_or_share(name: str, value: Any) -> "int | Share":
    """As `parse_size`; a percentage such as `'80%'` is a Share.

    Raises:
        ConfigError: neither.
    """
    if isinstance(value, Share):
        return value
    if isinstance(value, str) and value.strip().endswith("%"):
        share = Share(parse_fraction(name, value))
        if not share.fraction:
            raise ConfigError(f"{name} expects more than 0 %, got {value!r}")
        return share
    return parse_size(name, value)


def parse_path(name: str, value: Any) -> str:
    """A path as text, `~` expanded.

    Raises:
        ConfigError: empty, or no path.
    """
    if isinstance(value, str | os.PathLike) and os.fspath(value):
        return os.path.expanduser(os.fsdecode(os.fspath(value)))
    raise ConfigError(f"{name} expects a path, got {value!r}")


def parse_paths(name: str, value: Any) -> "str | tuple[str, ...]":
    """One path as text, several as a tuple.

    Raises:
        ConfigError: neither.
    """
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return tuple(parse_path(name, one) for one in value)
    return parse_path(name, value)


def size(default: int | None, *, least: int = 1, share: bool = False) -> Any:
    """A field in bytes; with `share` it may be a percentage."""

    def parse(name: str, value: Any) -> "int | Share":
        parsed = (parse_size_or_share if share else parse_size)(name, value)
        return _at_least(least, name, value, parsed)

    return field(default=default, metadata={PARSE: parse})


def _at_least(
    least: int, name: str, value: Any, parsed: "int | Share"
) -> "int | Share":
    if isinstance(parsed, int) and parsed < least:
        raise ConfigError(f"{name} expects at least {least} bytes, got {value!r}")
    return parsed


FIT = "fit"
"""All memory of a device that this process may take."""


def parse_device_memory(name: str, value: Any) -> "int | Share | str":
    """As `parse_size_or_share`, or `fit`.

    Raises:
        ConfigError: neither.
    """
    if isinstance(value, str) and value.strip().lower() == FIT:
        return FIT
    try:
        return _at_least(1, name, value, parse_size_or_share(name, value))
    except ConfigError as error:
        raise ConfigError(f"{error}; or {FIT!r}{did_you_mean(value, [FIT])}") from None


def fraction(default: float | None) -> Any:
    """A field from 0 to 1."""
    return field(default=default, metadata={PARSE: parse_fraction})


def places(default: Any = None) -> Any:
    """A field with a path or several."""
    return field(default=default, metadata={PARSE: parse_paths})


def parse_fields(settings: Any, prefix: str = "") -> None:
    """Parse the declared fields of a frozen dataclass in place; None stays where it is
    the default.

    Raises:
        ConfigError: the text names the field after `prefix`.
    """
    for declared in fields(settings):
        value = getattr(settings, declared.name)
        parse = declared.metadata.get(PARSE)
        optional = declared.default is None
        if parse is not None and not (value is None and optional):
            parsed = parse(prefix + declared.name, value)
            object.__setattr__(settings, declared.name, parsed)
