"""From a config name and overrides to a composed config."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from ssdtrain.errors import ConfigError
from ssdtrain.packaged import packaged_directory
from ssdtrain.quantities import did_you_mean
from ssdtrain.train.choices import DEFAULT_CONFIG, group_names
from ssdtrain.train.schema import register_schemas

# Hydra's grammar has no `~` in a value, and no shell expands one behind `=`.
_HOME = re.compile(r"([\w.+]+=)~(/[\w./-]*)?")

_UNREADABLE = (
    *(YAMLError, OmegaConfBaseException, OSError, ValueError, TypeError),
    *(LookupError, AttributeError, RecursionError, AssertionError),
)


def find_config(name: str) -> Path:
    """Return the file that `--config name` means: a path, a bare name in the working
    directory, or a packaged config. Raises ConfigError: there is no such file."""
    given = Path(name).expanduser()
    tried = [given.resolve()]
    if given.parent == Path("."):
        tried.append(packaged_directory() / given)
    for path in tried:
        if path.is_file():
            return path
    places = ", ".join(str(path) for path in tried)
    raise ConfigError(f"--config expects a YAML file, found none at {places}")


def compose_config(name: str, overrides: Sequence[str]) -> DictConfig:
    """Compose the config file `name` with Hydra overrides; groups next to it, then the
    packaged ones; without a defaults list it changes the packaged root. Raises
    ConfigError: no such file, or no YAML mapping; HydraException: an unknown name."""
    path = find_config(name)
    with _readable(path):
        register_schemas()
        return _compose(path, _root_of(path), [_expanded(word) for word in overrides])


def compose_groups(name: str, overrides: Sequence[str]) -> DictConfig:
    """Compose with the overrides that choose a group alone: what there is to set."""
    path = find_config(name)
    groups = [o for o in overrides if o.split("=")[0] in group_names()]
    return _compose(path, _root_of(path), groups)


def values_of(config: DictConfig) -> dict[str, Any]:
    """Return a config's plain values. ConfigError: a reference leads nowhere."""
    with _readable("the composed config"):
        return dict(OmegaConf.to_container(config, resolve=True))  # type: ignore[arg-type]


@contextmanager
def _readable(source: object) -> Iterator[None]:
    """Turn errors of YAML and OmegaConf into a ConfigError; Hydra's own pass."""
    try:
        yield
    except (HydraException, ConfigError):
        raise
    except _UNREADABLE as error:
        text = (str(error).splitlines() or [""])[0][:200]
        raise ConfigError(
            f"--config: {_culprit(source, error)} cannot be read "
            f"({type(error).__name__}: {text}); see configs/ for files that can"
        ) from error


def _culprit(source: object, error: Exception) -> str:
    """Return the file that Hydra cannot read: YAML's errors say which it is."""
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        return str(mark.name)
    is_file = isinstance(source, Path)
    return f"{source}, or a file that it names," if is_file else str(source)


def _compose(path: Path, root: str, overrides: Sequence[str]) -> DictConfig:
    search = [f"hydra.searchpath=['{packaged_directory().as_uri()}']"]
    GlobalHydra.instance().clear()
    with initialize_config_dir(config_dir=str(path.parent), version_base="1.3"):
        return compose(root, overrides=[*search, *overrides])


def _expanded(override: str) -> str:
    found = _HOME.fullmatch(override)
    if found is None:
        return override
    return f"{found[1]}'{Path.home()}{found[2] or ''}'"


def _root_of(path: Path) -> str:
    """Return the name of the root config to compose: the file's own, or one stored here
    that puts the file's values over the packaged root."""
    values = _changes(path)
    if values is None:
        return path.stem
    groups = set(group_names())
    chosen = {
        key: _as_name(key, value)
        for key, value in values.items()
        if key in groups and not isinstance(value, dict)
    }
    defaults: list[Any] = [Path(DEFAULT_CONFIG).stem]
    defaults += [{f"override {group}": choice} for group, choice in chosen.items()]
    rest = {key: value for key, value in values.items() if key not in chosen}
    words = [f"{group}='{choice}'" for group, choice in chosen.items()]
    packaged = packaged_directory() / DEFAULT_CONFIG
    _refuse_unknown(rest, _compose(packaged, packaged.stem, words), path)
    name = f"{path.stem}_over_{Path(DEFAULT_CONFIG).stem}"
    ConfigStore.instance().store(name, {"defaults": [*defaults, "_self_"], **rest})
    return name


def _as_name(group: str, value: object) -> str:
    """Return what chooses of a group. Raises ConfigError: a list."""
    if isinstance(value, list):
        raise ConfigError(
            f"--config: {group} expects one choice, or its settings, got {value}"
        )
    if isinstance(value, str):
        return value
    return "null" if value is None else str(value).lower()


def _changes(path: Path) -> dict[Any, Any] | None:
    """Return what a file changes of the packaged root; None of one that is a root."""
    try:
        values = OmegaConf.to_container(OmegaConf.load(path))
    except (YAMLError, OmegaConfBaseException, OSError) as error:
        raise ConfigError(f"--config: {path} is no YAML file ({error})") from error
    if not isinstance(values, dict):
        raise ConfigError(
            f"--config: {path} expects keys and values, got {type(values).__name__}"
        )
    if "defaults" in values or path.parent == packaged_directory():
        return None
    return values


def keys_set_by(name: str) -> list[str]:
    """Return the dotted keys that a config file without a defaults list sets."""
    values = _changes(find_config(name))
    return [] if values is None else [*_leaves(values)]


def _leaves(values: Mapping[Any, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _refuse_unknown(
    values: Mapping[Any, Any], known: DictConfig, path: Path, prefix: str = ""
) -> None:
    for key, value in values.items():
        if key not in known:
            raise ConfigError(
                f"--config: {path} sets {prefix}{key}, which is unknown"
                f"{did_you_mean(key, map(str, known))}"
            )
        node = known._get_node(key)
        if isinstance(value, Mapping) and isinstance(node, DictConfig):
            _refuse_unknown(value, node, path, f"{prefix}{key}.")


def dotted_keys(config: DictConfig, prefix: str = "") -> Iterator[str]:
    """Return all keys of a config, groups before what they hold."""
    for key in map(str, config):
        yield f"{prefix}{key}"
        inner = config._get_node(key)
        if isinstance(inner, DictConfig):
            yield from dotted_keys(inner, f"{prefix}{key}.")
