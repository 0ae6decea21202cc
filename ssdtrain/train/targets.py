"""From a config's `_target_` nodes to the trainer that they describe.

[Note: types of foreign settings] The graph trainers' groups are not structured configs:
no package imports another, so Hydra knows no types for their keys. Before anything is
built, each value is compared with the annotation of the parameter that it becomes; what
has no annotation, or one that YAML has no values for, is left to the target.
"""

import collections.abc
import functools
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from enum import Enum
from importlib import import_module
from typing import Any, Union, get_args, get_origin

from hydra.errors import HydraException, InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig

from ssdtrain.errors import ConfigError
from ssdtrain.quantities import did_you_mean
from ssdtrain.train.compose import values_of

_HYDRA = ("_target_", "_partial_", "_args_", "_convert_", "_recursive_")
_PLAIN = {
    int: "an integer",
    float: "a finite number",
    str: "a text",
    bool: "true or false",
    type(None): "null",
}
# Of torch's allocators, on the CPU and on a GPU.
_ALLOCATION = re.compile(r"[Tt]ried to allocate ([\d.]+ \w+)")
_LISTS = (list, tuple, collections.abc.Sequence)
_EXTRAS = {
    **dict.fromkeys(("torch_geometric", "scipy", "triton"), "gnn"),
    **{"deepspeed": "deepspeed", "megatron": "megatron", "kvikio": "gds"},
    **dict.fromkeys(("tokenizers", "transformers"), "train"),
    **dict.fromkeys(("tensorboard", "matplotlib"), "train"),
}


def build_trainer(config: DictConfig) -> Any:
    """Build the trainer that `trainer._target_` names: from the whole config if it has
    `from_config`, else by Hydra from the keys next to its name. It offers `run()`, and
    perhaps `prepare()`. Raises ConfigError: it cannot be built."""
    values = values_of(config)
    trainer = values.get("trainer")
    if not isinstance(trainer, Mapping) or trainer.get("_target_") is None:
        raise ConfigError(
            "the config names no trainer; add `- ssdtrain` to its defaults list, or "
            "trainer._target_."
        )
    kind = _located(trainer["_target_"], "trainer")
    if not callable(getattr(kind, "run", None)):
        raise ConfigError(
            "trainer._target_ expects a class with a method run(), such as "
            f"hector.train.NodeClassificationTrainer, got {trainer['_target_']!r}"
        )
    if hasattr(kind, "from_config"):
        return kind.from_config(values)
    refuse_unfit(trainer, "trainer")
    try:
        return instantiate(config.trainer)
    except (InstantiationException, ImportError, ValueError) as error:
        raise refusal(error) from error


def takes_whole_config(target: str) -> bool:
    """Return whether a trainer is given all groups; True if it cannot be found."""
    try:
        return hasattr(_located(target, "trainer"), "from_config")
    except ConfigError:
        return True


class UnforeseenError(ConfigError):
    """A trainer failed as no check foresaw: its traceback is worth keeping."""


def refusal(error: BaseException) -> ConfigError:
    """Return the error for the user: what `error` says, in a line."""
    last = _behind_hydra(error)
    told = isinstance(last, ValueError | OSError | ImportError)
    told = told or _ALLOCATION.search(str(last)) is not None
    return (ConfigError if told else UnforeseenError)(in_a_line(error))


def in_a_line(error: BaseException) -> str:
    """Return an error without line breaks; of a missing module, the extra with it."""
    last: BaseException | None = error
    while last is not None and not isinstance(last, ModuleNotFoundError):
        last = last.__cause__ or last.__context__
    if last is not None:
        return _not_installed(last)
    last = _behind_hydra(error)
    text = " ".join(str(last).split()) or "no reason given"
    asked = _ALLOCATION.search(text)
    if asked is not None:
        return (
            f"{asked[1]} of memory were asked for at once and are not there; set a "
            "smaller model, batch or graph"
        )
    if not isinstance(last, ValueError | OSError):
        text = f"{type(last).__name__}: {text}"
    if last is not error and "full_key: " in str(error):  # Hydra names the key there
        text += f" ({str(error).rpartition('full_key: ')[2].strip()})"
    return text


def _behind_hydra(error: BaseException) -> BaseException:
    while isinstance(error, HydraException) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _not_installed(missing: BaseException) -> str:
    name = str(getattr(missing, "name", "")).partition(".")[0]
    extra = _EXTRAS.get(name)
    how = f"pip install 'ssdtrain[{extra}]'" if extra else f"pip install {name}"
    return f"this needs {name}, which is not installed: {how}"


def refuse_unfit(node: Mapping[str, Any], where: str) -> None:
    """Compare a node's plain values, and those of nodes below it, with the parameters
    of its `_target_`. Raises ConfigError: a key is unknown, or a value is of another
    type."""
    target = _located(node["_target_"], where)
    try:
        parameters = _parameters(target)
    except (TypeError, ValueError) as error:  # `torch.randn`, `dict`: written in C
        raise ConfigError(
            f"{where}._target_ expects a class or function whose parameters Python "
            f"can tell, got {node['_target_']!r}"
        ) from error
    for name, value in node.items():
        if name in _HYDRA:
            continue
        key = f"{where}.{name}"
        if name not in parameters and _REST not in parameters:
            raise ConfigError(
                f"unknown setting {key}{did_you_mean(name, parameters)}; known: "
                f"{', '.join(sorted(parameters))}"
            )
        if isinstance(value, Mapping) and "_target_" in value:
            refuse_unfit(value, key)
        elif not _fits(parameters.get(name, Any), value):
            kinds = (parameters[name], *get_args(parameters[name]))
            known = [str(one.value) for kind in kinds if _is_enum(kind) for one in kind]
            expected = " or ".join(_described(parameters[name]))
            raise ConfigError(
                f"{key} expects {expected}, got {value!r}{did_you_mean(value, known)}"
            )


_REST = "**"
"""Name, among a target's parameters, of those that it does not declare."""


def _located(target: object, where: str) -> Callable[..., Any]:
    module, _, name = str(target).rpartition(".")
    try:
        found = getattr(import_module(module), name, None) if module else None
    except ImportError as error:
        raise ConfigError(in_a_line(error)) from error
    if (where == "trainer" and not isinstance(found, type)) or not callable(found):
        raise ConfigError(
            f"{where}._target_ expects a class such as hector.train."
            f"NodeClassificationTrainer, got {target!r}"
        )
    return typing.cast("Callable[..., Any]", found)


@functools.cache
def _parameters(target: Callable[..., Any]) -> dict[str, Any]:
    """Return annotations by parameter; Any where none can be resolved."""
    own = getattr(target, "__init__") if isinstance(target, type) else target  # noqa: B009
    try:
        hints = typing.get_type_hints(own)
    except (NameError, TypeError, AttributeError):
        hints = {}
    found: dict[str, Any] = {}
    for one in inspect.signature(target).parameters.values():
        if one.kind is one.VAR_KEYWORD:
            found[_REST] = Any
        elif one.kind is not one.VAR_POSITIONAL:
            found[one.name] = hints.get(one.name, Any)
    return found


def _fits(kind: Any, value: object) -> bool:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        enums = [one for one in arguments if _is_enum(one)]
        if isinstance(value, str) and enums:  # `str` stands beside it for its values
            return any(_fits(one, value) for one in enums)
        return any(_fits(one, value) for one in arguments)
    if origin in _LISTS:
        return isinstance(value, list) and all(_fits(arguments[0], v) for v in value)
    if kind is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and math.isfinite(typing.cast(float, value))
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if _is_enum(kind):
        return value in [member.value for member in kind]
    if kind in (str, bool, type(None)):
        return isinstance(value, kind)
    if kind is Any or kind is object or isinstance(kind, typing.TypeVar):
        return True
    # An object of a class, or a callable: only a node with `_target_` becomes one.
    return not isinstance(value, int | float | str | list | None)


def _described(kind: Any) -> list[str]:
    arguments = get_args(kind)
    if get_origin(kind) in (Union, types.UnionType):
        enums = [one for one in arguments if _is_enum(one)]
        shown = [one for one in arguments if not (enums and one is str)]
        return [text for one in shown for text in _described(one)]
    if get_origin(kind) in _LISTS:
        return [f"a list, each {' or '.join(_described(arguments[0]))}"]
    if _is_enum(kind):
        return [repr(member.value) for member in kind]
    name = getattr(kind, "__name__", str(kind))
    return [_PLAIN.get(kind, f"{name} (a node with _target_)")]


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)
