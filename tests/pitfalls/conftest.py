"""Settings under which all that can move moves at once."""

from typing import Any

import pytest


@pytest.fixture
def everything() -> dict[str, Any]:
    return {
        "target": "host",
        "min_bytes": 0,
        "plan": "offload-all",
        "recompute": "off",
        "window_bytes": 1,
        "host_bytes": 256 * 1024 * 1024,
    }
