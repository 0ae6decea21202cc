"""The settings as Hydra schemas: one registration, derived from the dataclasses."""

from copy import deepcopy
from dataclasses import MISSING, Field, field, fields, make_dataclass
from enum import Enum
from functools import partial
from typing import Any

from hydra.core.config_store import ConfigStore

from ssdtrain.config import OffloadConfig
from ssdtrain.quantities import PARSE
from ssdtrain.train.mcore.parallel import Parallel
from ssdtrain.train.settings import (
    DataSettings,
    EngineSettings,
    ModelSettings,
    TrainSettings,
)

# [Note: schemas are derived] OmegaConf reads an enum by its member's name and knows
# no union with a container, so the dataclasses themselves cannot be registered: users
# write `target=ssd`, not `target=SSD`. The derived schema keeps every field name and
# every plain type; enums and containers are `Any` there and checked by the dataclass.
_PLAIN = (int, float, bool, str, int | None, float | None, str | None)


def _default(source: "Field[Any]") -> Any:
    if source.default_factory is not MISSING:
        return source.default_factory()
    if source.default is MISSING:
        return "???"
    value = source.default
    if isinstance(value, Enum):
        return value.value
    return list(value) if isinstance(value, tuple) else value


def schema_of(cls: type) -> type:
    """Return a dataclass with the fields and defaults of `cls` that OmegaConf
    accepts."""
    made = []
    for source in fields(cls):
        parsed = PARSE in source.metadata  # "8GB" is no integer for OmegaConf
        kind = source.type if source.type in _PLAIN and not parsed else Any
        value = _default(source)
        default: Any = field(default_factory=partial(deepcopy, value))
        made.append((source.name, kind, default))
    return make_dataclass(f"{cls.__name__}Schema", made, kw_only=True)


def register_schemas() -> None:
    """Put the schemas into Hydra's ConfigStore; storing again changes nothing."""
    store = ConfigStore.instance()
    for group, cls in (
        ("model", ModelSettings),
        ("engine", EngineSettings),
        ("offload", OffloadConfig),
        ("data", DataSettings),
        ("train", TrainSettings),
        ("parallel", Parallel),
    ):
        store.store(group=group, name="schema", node=schema_of(cls))
