"""The README's measured tables, generated from `results/*.json`; never typed.

python -m recipes.bench.common.report          # print
python -m recipes.bench.common.report --write  # put them between the README's markers
python -m recipes.bench.common.report --check  # fail if the README is out of date
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from recipes.bench.common.cells import RESULTS, ROOT
from recipes.bench.common.results import Data, find
from recipes.bench.gather.tables import gather
from recipes.bench.gnn.tables import gnn
from recipes.bench.megatron.tables import megatron
from recipes.bench.models.tables import models
from recipes.bench.offload.tables import host_time, placement, recipes, rivals
from recipes.bench.planner.tables import planner, rok
from recipes.bench.rgnn.tables import rgnn
from recipes.bench.safety.tables import sanitize, searches, survival, verify
from recipes.bench.storage.tables import gds, io, malloc_hook, soak

README = ROOT / "README.md"
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


def of_file(name: str, build: Callable[[Data], str]) -> Callable[[Path], str]:
    """A table from the record `name`; empty if nothing is recorded."""

    def table(results: Path) -> str:
        data = find(results / f"{name}.json")
        return build(data) if data else ""

    return table


TABLES: tuple[tuple[str, Callable[[Path], str]], ...] = (
    ("offload", of_file("placement", placement)),
    ("planner", planner),
    ("planner", rok),
    ("models", models),
    ("offload", rivals),
    ("megatron", megatron),
    ("offload", of_file("recipes", recipes)),
    ("storage", of_file("io", io)),
    ("storage", of_file("gds", gds)),
    ("storage", of_file("malloc_hook", malloc_hook)),
    ("storage", of_file("soak_cpu", soak)),
    ("safety", of_file("verify", verify)),
    ("offload", of_file("host_time", host_time)),
    ("safety", survival),
    ("safety", searches),
    ("safety", of_file("sanitize", sanitize)),
    ("gather", gather),
    ("gnn", gnn),
    ("rgnn", rgnn),
)
"""The folder of the results, and what builds a table from that folder."""


def render() -> str:
    """All tables whose results are recorded."""
    return "\n\n".join(
        text for area, table in TABLES if (text := table(RESULTS / area))
    )


def updated(readme: str) -> str:
    """The README with the tables between its markers."""
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{render()}\n{END}{after}"


def main() -> None:
    """Print, write or check."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.write:
        README.write_text(updated(README.read_text()))
    elif options.check:
        if updated(README.read_text()) != README.read_text():
            sys.exit(
                "README.md is out of date; run "
                "python -m recipes.bench.common.report --write"
            )
    else:
        print(render())


if __name__ == "__main__":
    main()
