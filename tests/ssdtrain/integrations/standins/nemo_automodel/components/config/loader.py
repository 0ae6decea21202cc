"""A configuration of NeMo AutoModel 0.7, as far as ssdtrain meets it."""

from typing import Any


class ConfigNode:
    def __init__(self, d: dict[str, Any]) -> None:
        self.values = {
            name: ConfigNode(value) if isinstance(value, dict) else value
            for name, value in d.items()
        }

    def get(self, key: str, default: Any = None) -> Any:
        found: Any = self
        for part in key.split("."):
            found = found.values.get(part) if isinstance(found, ConfigNode) else None
        return default if found is None else found

    def to_dict(self) -> dict[str, Any]:
        return dict(self.values)
