"""The environment variable SSDTRAIN: one line that switches offloading on in trainers.

    SSDTRAIN=fit
    SSDTRAIN=16GB
    SSDTRAIN='max_overhead=2%,target=ssd,directory=/nvme0:/nvme1'

A first word without a name is `device_memory`. Several directories or regions stand
between colons. Empty, `0` and `off` switch nothing on.
"""

import os
import re
import sys
from dataclasses import fields
from typing import Any

from ssdtrain.config import MIB, OLD_NAMES, OffloadConfig, PlanChoice, Target
from ssdtrain.errors import ConfigError
from ssdtrain.quantities import did_you_mean

VARIABLE = "SSDTRAIN"
AUTOLOAD = "ssdtrain.integrations.autoload"
"""The module that `ssdtrain_autoload.pth` imports as Python starts."""
OFF = ("", "0", "off")
_EXAMPLES = "'fit', '16GB', '80%' or 'max_overhead=2%,target=ssd,directory=/nvme'"
_NUMBERS = ("io_threads", "seed")
_LISTS = ("directory", "regions")
_LARGE = (
    *("device_memory", "memory_budget"),
    *("host_bytes", "ssd_rated_bytes", "write_budget"),
)
"""Sizes of which nobody means fewer than a million bytes."""
_WORDS = {
    each.value: f"{name}={each.value}"
    for name, kind in (("target", Target), ("plan", PlanChoice))
    for each in kind
}
"""Values that are given without a name by mistake."""


def text() -> str | None:
    """What SSDTRAIN holds; None where it switches nothing on."""
    value = os.environ.get(VARIABLE, "").strip()
    return None if value.lower() in OFF else value


def asked() -> OffloadConfig | None:
    """Settings of SSDTRAIN; None where it switches nothing on.

    Raises:
        ConfigError: it holds no setting; the text says what came and what to set.
    """
    value = text()
    return None if value is None else parse_settings(value)


def refuse_plugin(trainer: str) -> None:
    """Raise ConfigError: SSDTRAIN is set where a plugin of the trainer is used."""
    if text() is not None:
        raise ConfigError(
            f"the plugin of {trainer} and {VARIABLE} both add ssdtrain to the trainer; "
            f"unset {VARIABLE}, got {text()!r}, or leave out the plugin."
        )


def is_active() -> bool:
    """Whether Python started with the autoload of ssdtrain in force."""
    return AUTOLOAD in sys.modules


def parse_settings(value: str) -> OffloadConfig:
    """Settings from the text of SSDTRAIN.

    Raises:
        ConfigError: a name or a value that can never work.
    """
    values: dict[str, Any] = {}
    for number, word in enumerate(value.split(",")):
        name, equals, given = (part.strip() for part in word.partition("="))
        if not equals and (number > 0 or name.lower() in _WORDS):
            raise _error(value, f"got {word.strip()!r} in it{_meant(name)}")
        if not equals:
            name, given = "device_memory", name
        if name in values:
            raise _error(value, f"it names {name!r} twice")
        try:
            values[name] = _value(name, given)
        except ConfigError as error:
            raise _error(value, str(error)) from None
    try:
        return OffloadConfig.from_mapping(values)
    except ConfigError as error:
        near = "" if "=" in value else did_you_mean(value, _WORDS.values())
        raise _error(value, f"{error}{near}") from None


def _error(value: str, said: str) -> ConfigError:
    end = "" if said.endswith(("?", ".")) else "."
    return ConfigError(f"{VARIABLE}={value!r}: {said}{end} Examples: {_EXAMPLES}.")


def _meant(word: str) -> str:
    """A setting with the value, or of the name, that a lone word may stand for."""
    names = {each.name: f"{each.name}=..." for each in fields(OffloadConfig)}
    near = did_you_mean(word, [*_WORDS, *names])
    for known, meant in (_WORDS | names).items():
        near = near.replace(repr(known), repr(meant))
    return near


def _value(name: str, given: str) -> Any:
    known = [each.name for each in fields(OffloadConfig)]
    if name not in known and name not in OLD_NAMES:
        apart = "; settings stand between commas" if re.search(r"[\s;]", name) else ""
        near = did_you_mean(name, [*known, *OLD_NAMES])
        raise ConfigError(
            f"unknown setting {name!r}{apart}{near}; known: {', '.join(known)}"
        )
    if not given or given.lower() in ("none", "null"):
        raise ConfigError(f"{name} expects a value, got {given!r}; leave {name} out")
    if name == "trace":
        if given.lower() not in ("true", "false"):
            raise ConfigError(f"trace expects true or false, got {given!r}")
        return given.lower() == "true"
    if name in _NUMBERS:
        try:
            return int(given)
        except ValueError:
            raise ConfigError(f"{name} expects a number, got {given!r}") from None
    if name in _LARGE and given.isdigit() and 0 < int(given) < MIB:
        raise ConfigError(f"{name} is {given} bytes; did you mean '{given}GB'?")
    if name in _LISTS and os.pathsep in given:
        return tuple(given.split(os.pathsep))
    return given
