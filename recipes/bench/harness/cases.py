"""The table of benchmarks."""

import ast
from pathlib import Path
from typing import NamedTuple

from recipes.bench.harness.tables import Column, table

ROOMS = Path(__file__).resolve().parents[1]


class Case(NamedTuple):
    """A benchmark: the module of this name below `recipes.bench`, and its `main`."""

    name: str
    budget_s: float = 600
    """Nothing is started after that, unless `--budget-s` says otherwise."""
    seconds: str = ""
    """On an H200, start included; `CPU`: no GPU is needed."""
    words: str = ""
    """Of a usual command."""
    file: str = ""
    """Of the results, where it is not that of the name."""

    @property
    def record(self) -> str:
        """Below `results/`, without `.json`."""
        return self.file or self.name.replace(".", "/", 1)

    @property
    def what(self) -> str:
        """What the module says of itself first; it is not imported."""
        path = ROOMS / f"{self.name.replace('.', '/')}.py"
        found = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        return " ".join(found.split("\n\n")[0].split())


CASES = (
    Case("models.foretold", seconds="CPU"),
    Case("models.held_out", 300),
    Case("models.unseen", 3600),
    Case("models.real_models", seconds="600"),
    Case("models.trl_steps", 240, words="--case grpo"),
    Case("offload.placement", seconds="320", words="--budget-s 310"),
    Case("offload.host_actions", 200, "200"),
    Case("planner.regret", 250, "270", file="planner/planner"),
    Case("planner.rok", 150, "160"),
    Case("safety.verify", 45, "55"),
    Case("safety.survival", 60, "25"),
    Case("safety.sanitize", 55, "60"),
    Case("safety.graphs", 36_000, "CPU", "--graphs 102000", "safety/graphs_cpu"),
    Case("safety.surprises", 36_000, "CPU", file="safety/surprises_cpu"),
    Case("safety.opinfo", 1200, "CPU", file="safety/opinfo_cpu"),
    Case(
        *("safety.fault_soak", 900, "CPU", "--steps 2500 --directory DIR"),
        file="safety/fault_soak_cpu",
    ),
    Case("safety.zoo", 14_400, "CPU", words="--workers 2", file="safety/zoo_cpu"),
    Case("safety.interrupts", 3600, "CPU", words="--signals 1000"),
    Case("safety.limits", 580),
    Case("safety.leaks", 3600, "CPU", words="--steps 100000"),
    Case("safety.graph_programs", 36_000, "CPU", file="safety/graph_programs_cpu"),
    Case("storage.ssd", 90, "60", "--directory DIR --budget-s 60", "storage/io"),
    Case("foresight.collectives", 60),
    Case("foresight.kernels", seconds="CPU", words="--name h100"),
    Case("foresight.steps", 60),
    Case("search.random_graphs", seconds="CPU"),
    Case("search.table_regret", 580),
    Case("search.layout_regret", 580),
    Case("megatron.scale", 1500),
    Case("gather.sweep", 200, "250", words="--budget-s 250", file="gather/gather"),
    Case("gnn.tiering", 60, "70"),
    Case("gnn.epochs", 120, "120", file="gnn/gnn"),
    Case("traversal.campaign", file="traversal/traversal"),
    Case("traversal.requests", 120),
    Case("rgnn.batches", 90, "95"),
    Case("rgnn.layers", 250, "250", file="rgnn/rgnn"),
    Case("rgnn.dgl", 170),
    Case("rgnn.messages", 120),
    Case("rgnn.joined", 100),
    Case("rgnn.counters", 300),
)


def listed(*_: object) -> str:
    """The table for people."""
    columns: dict[str, Column] = {
        "name": lambda case: f"`{case.name} {case.words}".strip() + "`",
        "s": lambda case: case.seconds,
        "what": lambda case: case.what,
    }
    return table(CASES, columns, line="--")
