"""How sessions run all regions again from the first step, and move everything."""

from typing import Any

SETTINGS: dict[str, Any] = {
    "target": "host",
    "min_bytes": 0,
    "plan": "offload-all",
    "recompute": "regions",
    "window_bytes": 1,
}
