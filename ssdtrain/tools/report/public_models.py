"""Shapes of public models, as their `config.json` files give them.

Random weights of these shapes take as much memory and time as the trained ones.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PUBLIC: Mapping[str, Mapping[str, Any]] = json.loads(
    Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
)
