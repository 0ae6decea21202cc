"""The part of torchtitan 0.3's configuration that ssdtrain meets."""

from dataclasses import dataclass, fields, replace
from typing import Any

from torchtitan.config.override import apply_overrides, override

__all__ = ["Configurable", "apply_overrides", "derive", "override"]


OWNER = "_owner"  # what ssdtrain reads


class Configurable:
    @dataclass(kw_only=True, slots=True)
    class Config:
        def build(self, **kwargs: Any) -> Any:
            owner: Any = getattr(self, OWNER)
            return owner(config=replace(self), **kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "Config" in cls.__dict__:
            if "__slots__" not in cls.Config.__dict__:
                raise TypeError("Config must use @dataclass(kw_only=True, slots=True)")
            setattr(cls.Config, OWNER, cls)


def derive(source: Any, target_cls: Any, **deltas: Any) -> Any:
    values = {each.name: getattr(source, each.name) for each in fields(source)}
    return target_cls(**{**values, **deltas})
