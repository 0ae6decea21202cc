"""The part of axolotl 0.19's plugins that ssdtrain meets."""

import importlib
from typing import Any


class BasePlugin:
    def register(self, cfg: Any) -> None: ...

    def get_input_args(self) -> str | None: ...

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        return []

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
        return []

    def post_train(self, cfg: Any, model: Any) -> None: ...


class PluginManager:
    instance: "PluginManager | None" = None

    def __init__(self) -> None:
        self.plugins: dict[str, BasePlugin] = {}

    @classmethod
    def get_instance(cls) -> "PluginManager":
        cls.instance = cls.instance or cls()
        return cls.instance

    def register(self, plugin_name: str) -> None:
        module, _, kind = plugin_name.rpartition(".")
        self.plugins[plugin_name] = getattr(importlib.import_module(module), kind)()

    def get_input_args(self) -> list[str]:
        found = [plugin.get_input_args() for plugin in self.plugins.values()]
        return [each for each in found if each is not None]

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        plugins = self.plugins.values()
        return [cb for p in plugins for cb in p.add_callbacks_pre_trainer(cfg, model)]

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
        plugins = self.plugins.values()
        return [
            cb for p in plugins for cb in p.add_callbacks_post_trainer(cfg, trainer)
        ]

    def post_train(self, cfg: Any, model: Any) -> None:
        for plugin in self.plugins.values():
            plugin.post_train(cfg, model)
