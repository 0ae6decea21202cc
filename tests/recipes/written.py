"""A results file as the benchmarks write it, with given cells."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "device": "a GPU",
    "num_devices": 1,
    "num_cpus": 2,
    "versions": {"torch": "2"},
    "command": "x.py",
}


def write(path: Path, cells: Mapping[str, Any], **settings: Any) -> None:
    """Write `cells` with an environment and `settings`."""
    found = {"environment": ENVIRONMENT, "settings": settings, "cells": cells}
    path.write_text(json.dumps(found))
