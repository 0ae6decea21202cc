"""Overrides by `module.function`, of torchtitan 0.3."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

REGISTRY: dict[str, tuple[type, Callable[..., Any]]] = {}


@dataclass
class OverrideConfig:
    imports: list[Any] = field(default_factory=list)


def override(*, target: type, description: str = "") -> Callable[..., Any]:
    def register(factory: Any) -> Any:
        REGISTRY[f"{factory.__module__}.{factory.__name__}"] = target, factory
        return factory

    return register


def apply_overrides(override_config: OverrideConfig, config_root: Any) -> None:
    for entry in override_config.imports:
        name, settings = (entry, {}) if isinstance(entry, str) else entry
        importlib.import_module(name.rpartition(".")[0])
        target, factory = REGISTRY[name]
        for each in fields(config_root):
            value = getattr(config_root, each.name)
            if isinstance(value, target):
                setattr(config_root, each.name, factory(value, **settings))
