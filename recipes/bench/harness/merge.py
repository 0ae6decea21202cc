"""One results file of several: of processes that ran at the same time.

A process for each GPU writes a file of its own (`--out`); their cells belong in one.
All must have been measured with the same settings on devices of one kind by the same
versions; a cell that two files hold is the last one's, unless that is an error.

    python -m recipes.bench merge part0.json part1.json --into predictions.json
"""

from collections.abc import Sequence
from pathlib import Path

from recipes.bench.harness.cli import UsageError
from recipes.bench.harness.records import Data, read, write

ALIKE = ("device", "num_devices", "num_cpus", "python", "versions")
"""Of environments that may stand in one file."""


def merged(parts: Sequence[Data]) -> Data:
    """All cells of these results, with the commands of all.

    Raises:
        ValueError: they are not of one benchmark on one kind of device; says of what.
    """
    first = parts[0]
    environment = {**first["environment"]}
    found: Data = {**first, "environment": environment, "cells": {}}
    for part in parts:
        if part["settings"] != first["settings"]:
            raise ValueError(
                f"expects the settings {first['settings']}, got {part['settings']}"
            )
        for name in ALIKE:
            own, other = environment.get(name), part["environment"].get(name)
            if own != other:
                raise ValueError(f"expects {name} {own!r}, got {other!r}")
        for name, cell in part["cells"].items():
            before = found["cells"].get(name)
            if before is None or "error" not in cell or "error" in before:
                found["cells"][name] = cell
    commands = [part["environment"].get("command", "") for part in parts]
    environment["command"] = "; ".join(dict.fromkeys(filter(None, commands)))
    dates = [part["environment"].get("date", "") for part in parts]
    environment["date"] = max(dates)
    return found


def main(parts: tuple[Path, ...], /, *, into: Path) -> None:
    """Read the files and write one.

    Args:
        into: may be one of them
    """
    try:
        found = merged([read(path) for path in parts])
    except ValueError as error:
        raise UsageError(str(error)) from error
    write(into, found)
    print(f"{len(found['cells'])} cells in {into}")
