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


def apply_overrides(config: OverrideConfig, root: Any) -> None:
    for entry in config.imports:
        name, settings = (entry, {}) if isinstance(entry, str) else entry
        importlib.import_module(name.rpartition(".")[0])
        target, factory = REGISTRY[name]
        for each in fields(root):
            value = getattr(root, each.name)
            if isinstance(value, target):
                setattr(root, each.name, factory(value, **settings))
