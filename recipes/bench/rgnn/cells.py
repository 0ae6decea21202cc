"""What `rgnn.layers` measures: cells, contenders, and the order of the work."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

from hector.train import LayerKind

# Wu's three layers. Each has a counterpart in PyG and a sorted baseline; a layer of
# hector's that has none is not measured here.
KINDS = (LayerKind.RGCN, LayerKind.RGAT, LayerKind.HGT)
# Most telling first: Wu's case study, the small graphs, then by edges.
GRAPHS = ("fb15k", "aifb", "mutag", "bgs", "biokg", "am", "mag", "wikikg2")
WIDTHS = (32, 64, 128)


class Task(str, Enum):
    """What one timed epoch does (Wu, section 3.4.1)."""

    INFERENCE = "inference"
    TRAINING = "training"
    """Forward, negative log-likelihood on random labels, backward."""


class Phase(str, Enum):
    """Groups of measurements, the most valuable first."""

    MAIN = "main"
    """Ours, chosen by the cost model, against the eager baselines, in float32."""
    BFLOAT16 = "bfloat16"
    """The same in bfloat16."""
    ABLATION = "ablation"
    """Ours with each fixed setting of the two optimizations (Table 3.5)."""
    WIDTHS = "widths"
    """Ours at 32, 64 and 128 where products may use TF32 (Figure 3.12)."""


class Contender(str, Enum):
    """Who computes the layer."""

    HECTOR = "hector"
    HECTOR_NONE = "hector-none"
    HECTOR_COMPACTION = "hector-compaction"
    HECTOR_REORDERING = "hector-reordering"
    HECTOR_BOTH = "hector-both"
    SORTED_LOOP = "sorted-loop"
    SORTED_GROUPED = "sorted-grouped"
    PYG = "pyg"
    PYG_FAST = "pyg-fast"

    @property
    def ours(self) -> bool:
        return self.value.startswith("hector")


SETTINGS = (
    Contender.HECTOR_NONE,
    Contender.HECTOR_COMPACTION,
    Contender.HECTOR_REORDERING,
    Contender.HECTOR_BOTH,
)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One layer on one graph."""

    graph: str
    model: LayerKind
    task: Task
    dtype: str
    """float32, tf32 (float32 whose products PyTorch is told may use TF32) or
    bfloat16."""
    width: int = 64
    """Input and output channels; one head."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """One measurement."""

    phase: Phase
    cell: Cell
    contender: Contender

    def key(self) -> dict[str, Any]:
        """Plain JSON values that identify the measurement in the results."""
        cell = {k: getattr(v, "value", v) for k, v in asdict(self.cell).items()}
        return {**cell, "contender": self.contender.value, "what": "time"}

    @property
    def name(self) -> str:
        """Of its cell in the results."""
        return name_of(self.key())


def name_of(key: dict[str, Any]) -> str:
    """The name of the cell with this key."""
    parts = ("graph", "model", "task", "dtype", "width", "contender", "what")
    return "/".join(str(key[part]) for part in parts)


def baselines(model: LayerKind, dtype: str) -> list[Contender]:
    found = [Contender.SORTED_LOOP, Contender.PYG]
    if model is LayerKind.RGCN:
        found.append(Contender.PYG_FAST)
    if dtype == "bfloat16":
        found.append(Contender.SORTED_GROUPED)
    return found


def plan(phases: Iterable[Phase], graphs: Iterable[str]) -> list[Work]:
    """All measurements in the order they are worth taking."""
    graphs = list(graphs)
    return [
        Work(phase=phase, cell=cell, contender=contender)
        for phase in phases
        for graph in graphs
        for cell, contender in _PHASES[phase](graph)
    ]


_Row = tuple[Cell, Contender]


def _cells(
    graph: str, models: Sequence[LayerKind] = KINDS, dtype: str = "float32"
) -> list[Cell]:
    return [
        Cell(graph=graph, model=model, task=task, dtype=dtype)
        for model in models
        for task in Task
    ]


def _each(cells: Iterable[Cell], *contenders: Contender) -> Iterator[_Row]:
    return ((cell, contender) for cell in cells for contender in contenders)


def _against(graph: str, dtype: str) -> Iterator[_Row]:
    for cell in _cells(graph, dtype=dtype):
        yield from _each([cell], Contender.HECTOR, *baselines(cell.model, dtype))


def _widths(graph: str) -> Iterator[_Row]:
    cells = _cells(graph, dtype="tf32")
    return _each(
        (replace(cell, width=width) for cell in cells for width in WIDTHS),
        Contender.HECTOR,
    )


_PHASES: dict[Phase, Callable[[str], Iterable[_Row]]] = {
    Phase.MAIN: lambda graph: _against(graph, "float32"),
    Phase.BFLOAT16: lambda graph: _against(graph, "bfloat16"),
    # Table 3.5 first: the attention layers.
    Phase.ABLATION: lambda graph: _each(
        _cells(graph, [*KINDS[1:], KINDS[0]]), *SETTINGS
    ),
    Phase.WIDTHS: _widths,
}
