"""Results as the benchmarks write them, with given cells."""

from collections.abc import Mapping
from typing import Any

ENVIRONMENT = {
    "device": "a GPU",
    "num_devices": 1,
    "num_cpus": 2,
    "versions": {"torch": "2"},
    "command": "x.py",
}


def data_of(cells: Mapping[str, Any], **settings: Any) -> dict[str, Any]:
    """`cells` with an environment and `settings`."""
    return {"environment": ENVIRONMENT, "settings": settings, "cells": dict(cells)}
