"""What a run of the node classification trainer is made of."""

import math
from dataclasses import dataclass
from enum import Enum


class LayerKind(str, Enum):
    """The layer of a model: relational ones, and those of `hector.message`, to which
    all relations are one."""

    RGCN = "rgcn"
    RGAT = "rgat"
    HGT = "hgt"
    SAGE = "sage"
    GIN = "gin"
    GAT = "gat"
    TREELSTM = "treelstm"


MESSAGE_KINDS = (LayerKind.SAGE, LayerKind.GIN, LayerKind.GAT, LayerKind.TREELSTM)
"""Layers of `hector.message`."""
_WITH_BASES = (LayerKind.RGCN, LayerKind.RGAT)
_WITH_HEADS = (LayerKind.RGAT, LayerKind.HGT, LayerKind.GAT)


class Resume(str, Enum):
    """What to do with a checkpoint found in the output directory."""

    AUTO = "auto"
    """Go on from it; start anew when there is none."""
    NEVER = "never"
    """Start anew and overwrite it."""
    MUST = "must"
    """Go on from it; fail when there is none."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Learned node embeddings, then `num_layers` relational layers."""

    layer: LayerKind | str
    hidden_channels: int = 16
    """Width of the embeddings and of the layers between."""
    num_layers: int = 2
    num_bases: int | None = None
    """Basis decomposition of RGCN and RGAT weights; other layers have none."""
    heads: int = 1
    """Attention heads of the layers before the last (RGAT, HGT, GAT); others have
    none."""
    dropout: float = 0.0
    """Probability after each layer before the last."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer", LayerKind(self.layer))
        for name in ("hidden_channels", "num_layers", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} >= 1, got {getattr(self, name)}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"expected dropout in [0, 1), got {self.dropout}")
        if self.hidden_channels % self.heads:
            raise ValueError(
                f"expected hidden_channels divisible by heads = {self.heads}, got "
                f"{self.hidden_channels}"
            )
        kind = LayerKind(self.layer)
        if self.heads > 1 and kind not in _WITH_HEADS:
            raise ValueError(
                f"expected heads=1 for {kind.value}, which has no attention, got "
                f"{self.heads}"
            )
        if self.num_bases is not None:
            if kind not in _WITH_BASES:
                raise ValueError(
                    f"expected num_bases=null for {kind.value}, whose weights have no "
                    f"bases, got {self.num_bases}"
                )
            if self.num_bases < 1:
                raise ValueError(f"expected num_bases >= 1, got {self.num_bases}")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """A data set in a directory, or a generated graph of its size."""

    name: str = "aifb"
    """When `directory` is given, a name of `hector.datasets.rdf.RDF_TASKS`, or mag or
    fb15k-237, whose labels are generated; else a row of Table 3.3
    (`hector.datasets.generate.TABLE_3_3`), or expressions: generated trees."""
    directory: str | None = None
    """Holds the data set's files; None generates a graph."""
    scale: float = 1.0
    """Nodes and edges of the generated graph over the table's."""
    num_classes: int = 4
    """Of the generated labels; those of expressions are two."""
    num_labelled: int = 176
    """Nodes with a generated label; four fifths are trained on."""

    def __post_init__(self) -> None:
        if not 0 < self.scale < math.inf:
            raise ValueError(f"expected data.scale above 0, got {self.scale}")
        if self.num_classes < 2 or self.num_labelled < 2:
            raise ValueError(
                "expected data.num_classes >= 2 and data.num_labelled >= 2, got "
                f"{self.num_classes} and {self.num_labelled}"
            )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Adam."""

    learning_rate: float = 0.01
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if not self.learning_rate > 0 or self.weight_decay < 0:
            raise ValueError(
                "expected learning_rate > 0 and weight_decay >= 0, got "
                f"{self.learning_rate} and {self.weight_decay}"
            )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Seeds, device and files of a run."""

    seed: int = 0
    """Seed of the first repetition; repetition i uses seed + i. The generated graph
    is made of `seed` alone."""
    num_seeds: int = 1
    """Repetitions; the accuracy is their mean."""
    device: str = "auto"
    """`auto` is CUDA when there is one, else the CPU."""
    dtype: str = "float32"
    """Of parameters and activations: float64, float32, bfloat16 or float16."""
    output_directory: str | None = None
    """Gets `metrics.jsonl` and `checkpoint.pt`; None writes no file."""
    checkpoint_epochs: int = 0
    """Epochs between two checkpoints; 0 writes none."""
    resume: Resume | str = Resume.AUTO
    progress: bool = True
    """Show a bar on standard error; where that is no terminal, a line every ten
    seconds."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "resume", Resume(self.resume))
        if self.num_seeds < 1 or self.checkpoint_epochs < 0:
            raise ValueError(
                "expected num_seeds >= 1 and checkpoint_epochs >= 0, got "
                f"{self.num_seeds} and {self.checkpoint_epochs}"
            )
        if self.checkpoint_epochs and self.output_directory is None:
            raise ValueError(
                f"expected output_directory with checkpoint_epochs = "
                f"{self.checkpoint_epochs}, got none"
            )
