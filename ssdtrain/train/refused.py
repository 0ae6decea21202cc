"""Settings that are refused: unknown ones, and those that the trainer does not read.

[Note: groups nobody reads] The root config holds the groups of language models
(`model`, `size`, `train`, ...). A trainer that takes the whole config (`from_config`)
reads them; any other, such as those of the group `gnn`, is built from the keys below
`trainer`, and from what those refer to. Setting a group that it does not read would do
nothing, so it is refused, and the run's config is shown and recorded without it.
"""

import re
from collections.abc import Iterator, Sequence

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict

from ssdtrain.errors import ConfigError
from ssdtrain.train.choices import group_names, no_choice
from ssdtrain.train.compose import compose_groups, dotted_keys, keys_set_by
from ssdtrain.train.names import found_by_last_name, meant
from ssdtrain.train.targets import takes_whole_config

_INTERNAL = re.compile(r"\s*(full_key|object_type|See https)|To append to your config")
_NO_CHOICE = re.compile(r"(?:In '\w+': )?Could not find '(\w+)/(\w+)'")
_NO_NAME = re.compile(r"true|false|null|[-+.\d]+", re.I)
_NO_KEY = re.compile(r"Could not override '([^']+)'")
_NO_VALUE = re.compile(r"Error merging override ([^=]+)=(.*)")
_TYPES = {
    "converted to Integer": "an integer",
    "converted to Float": "a number",
    "not a valid bool": "true or false",
    "is not Optional": "a value",
}
"""How OmegaConf says what a key takes, and how we do."""
_UNKNOWN_KEY = re.compile(r"Key '[^']*' (is )?not in ")
CHOOSES = "gnn"
"""The group whose choice is a trainer."""
COUNTERPARTS = {"size": "model", "data": "dataset"}
"""Groups whose settings a trainer may have below another key of its own."""


def read_groups_alone(config: DictConfig, name: str, words: Sequence[str]) -> None:
    """Remove from `config` the groups that its trainer does not read. Raises
    ConfigError: the file `name` or an override sets something in one of them."""
    unread = unread_groups(config)
    if not unread:
        return
    chosen = [word for word in words if word.startswith(f"{CHOOSES}=")]
    who = chosen[-1] if chosen else str(config.trainer.get("_target_"))
    given = [(word.lstrip("+~"), word) for word in words]
    given += [(key, f"{key} of {name}") for key in keys_set_by(name)]
    idle = [(k, told) for k, told in given if re.split(r"[.=@/]", k)[0] in unread]
    if idle:
        known = [*dotted_keys(config.trainer, "trainer.")]
        told = [f"{text}{_instead(key, known)}" for key, text in idle]
        raise ConfigError(
            f"{who} does not read {', nor '.join(told)}; it reads what stands below "
            f"trainer: {', '.join(_shown(config.trainer))}."
        )
    with open_dict(config):
        for group in unread:
            del config[group]


def unread_groups(config: DictConfig) -> set[str]:
    """Return the groups that the config holds and its trainer does not look at."""
    trainer = config.get("trainer")
    if not isinstance(trainer, DictConfig):
        return set()
    target = trainer.get("_target_")
    if target is None or takes_whole_config(str(target)):
        return set()
    references = " ".join(re.findall(r"\$\{[^}]*\}", OmegaConf.to_yaml(trainer)))
    return {
        group
        for group in group_names()
        if group in config and not re.search(rf"\b{group}\.", references)
    }


def _instead(override: str, known: Sequence[str]) -> str:
    """Return the setting of the trainer that may be meant, in brackets."""
    key = override.partition("=")[0]
    group, _, inner = key.partition(".")
    if inner:
        found = " or ".join(found_by_last_name(key, known))
        return f" (did you mean {found}?)" if found else ""
    for name in (group, COUNTERPARTS.get(group, group)):
        if f"trainer.{name}" in known:
            return f" (it has trainer.{name} instead)"
    return ""


def _shown(trainer: DictConfig) -> Iterator[str]:
    for key in map(str, trainer):
        inner = trainer._get_node(key)
        if not key.startswith("_"):
            yield f"{key}.*" if isinstance(inner, DictConfig) else key


def told_by_hydra(error: HydraException, name: str, overrides: Sequence[str]) -> str:
    """Return what Hydra refused, the nearest known name, and the choices."""
    message, _, options = str(error).partition("Available options in")
    lines = f"{message.strip()}\n{error.__cause__ or ''}".splitlines()
    told = [line for line in lines if line and not _INTERNAL.match(line)] or [""]
    known = [
        option
        for option in options.partition("Config search path")[0].split()[1:]
        if option != "schema" and not option.startswith("_")
    ]
    choice, key = _NO_CHOICE.match(str(error)), _NO_KEY.match(str(error))
    if choice is not None:
        return no_choice(choice[1], choice[2], known)
    if key is not None and len(told) > 1 and _UNKNOWN_KEY.match(told[1]):
        return f"unknown setting {key[1]}{_nearest_key(key[1], name, overrides)}"
    value = _NO_VALUE.match(str(error))
    kind = next((kind for name, kind in _TYPES.items() if name in told[-1]), None)
    if value is not None and kind is not None:
        return f"{value[1].lstrip('+')} expects {kind}, got {value[2]!r}"
    return "\n".join(told).strip() or type(error).__name__


def checked(word: str) -> str:
    """Return the override as Hydra takes it. Raises ConfigError: it has no value, or a
    list where one choice is taken."""
    key, equals, value = word.partition("=")
    if not equals and not key.startswith("~"):
        raise ConfigError(f"expects key=value such as train.steps=100, got {word!r}")
    if key not in group_names():
        return word
    if value.startswith("["):
        raise ConfigError(
            f"{key} expects one choice, got {value}; -m {key}={value.strip('[]')} "
            "makes a run of each."
        )
    # `offload=false` is no string to Hydra; as one it is told what there is to choose.
    return f"{key}='{value}'" if _NO_NAME.fullmatch(value) else word


def _nearest_key(key: str, name: str, overrides: Sequence[str]) -> str:
    try:
        config = compose_groups(name, overrides)
    except HydraException:
        return meant(key, group_names())
    unread = unread_groups(config)
    keys = [k for k in dotted_keys(config) if k.partition(".")[0] not in unread]
    return meant(key, [*keys, *group_names()])
