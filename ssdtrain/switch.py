"""The environment variable SSDTRAIN: one line that switches offloading on in trainers.

    SSDTRAIN=fit
    SSDTRAIN=16GB
    SSDTRAIN='max_overhead=2%,target=ssd,directory=/nvme0:/nvme1'

A first word without a name is `device_memory`. Several directories or regions stand
between colons. Empty, `0` and `off` switch nothing on.
"""

import os
import sys
from dataclasses import fields
from typing import Any

from ssdtrain.config import OLD_NAMES, OffloadConfig
from ssdtrain.errors import ConfigError
from ssdtrain.quantities import did_you_mean

VARIABLE = "SSDTRAIN"
AUTOLOAD = "ssdtrain.integrations.autoload"
"""The module that `ssdtrain_autoload.pth` imports as Python starts."""
OFF = ("", "0", "off")
_EXAMPLES = "'fit', '16GB', '80%' or 'max_overhead=2%,target=ssd,directory=/nvme'"
_NUMBERS = ("io_threads", "seed")
_LISTS = ("directory", "regions")


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
        if not equals and number == 0:
            name, given = "device_memory", name
        elif not equals:
            raise ConfigError(f"{VARIABLE} expects {_EXAMPLES}, got {word!r} in it")
        if name in values:
            raise ConfigError(f"{VARIABLE} names {name!r} twice: {value!r}")
        values[name] = _value(name, given)
    try:
        return OffloadConfig.from_mapping(values)
    except ConfigError as error:
        raise ConfigError(
            f"{VARIABLE}={value!r}: {error}. {VARIABLE} expects {_EXAMPLES}."
        ) from None


def _value(name: str, given: str) -> Any:
    known = [each.name for each in fields(OffloadConfig)]
    if name not in known and name not in OLD_NAMES:
        raise ConfigError(
            f"{VARIABLE} has an unknown setting {name!r}{did_you_mean(name, known)}; "
            f"known: {', '.join(known)}"
        )
    if name == "trace":
        if given.lower() not in ("true", "false"):
            raise ConfigError(f"{VARIABLE}: trace expects true or false, got {given!r}")
        return given.lower() == "true"
    if name in _NUMBERS:
        try:
            return int(given)
        except ValueError:
            raise ConfigError(
                f"{VARIABLE}: {name} expects a number, got {given!r}"
            ) from None
    if name in _LISTS and os.pathsep in given:
        return tuple(given.split(os.pathsep))
    return given
