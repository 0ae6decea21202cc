"""Where an operator on unified tensors runs, and what its result is.

The rules of section 4.4.3 of "Efficient Systems for Sparse and Large Neural Networks"
(PyTorch-Direct) as a table in data. The dissertation prints the rules as an image
(Table 4.2) and states these in its text: an operator on host-affine unified tensors
computes on the host and gives a unified tensor; on GPU-affine ones it computes on the
GPU and gives a CUDA tensor; with any CUDA operand only a GPU can compute; CPU scalars
decide nothing, as everywhere in PyTorch. The rows marked `OURS` fill what the text
leaves open.
"""

import enum
import functools
from collections.abc import Iterable
from dataclasses import dataclass


class Affinity(enum.Enum):
    """Who works on a unified tensor when no CUDA tensor decides."""

    HOST = "host"
    GPU = "gpu"


class Mix(enum.Enum):
    """Affinities of the unified operands of one call."""

    HOST = "host"
    GPU = "gpu"
    BOTH = "both"


class Cpu(enum.Enum):
    """The CPU operands of one call."""

    NONE = "none"
    SCALARS = "scalars"  # of dimension 0 only
    TENSORS = "tensors"  # at least one of dimension 1 or more


class Written(enum.Enum):
    """What the operator writes in place (its own result apart)."""

    NOTHING = "nothing"
    UNIFIED = "unified"
    CUDA = "cuda"
    CPU = "cpu"


class Compute(enum.Enum):
    HOST = "host"
    GPU = "gpu"
    REFUSE = "refuse"


class Result(enum.Enum):
    UNIFIED = "unified"
    CUDA = "cuda"  # on a machine without a GPU: a plain CPU tensor
    WRITTEN = "written"  # the operand that was written, whatever it is
    NONE = "none"


class Source(enum.Enum):
    SECTION_4_4_3 = "4.4.3"
    TABLE_4_1 = "Table 4.1"
    PYTORCH = "PyTorch's own law"
    OURS = "ours"


@dataclass(frozen=True, kw_only=True)
class Operands:
    """What the rules look at: nothing else of a call matters."""

    mix: Mix
    cuda: bool
    """At least one CUDA operand, of any dimension."""

    cpu: Cpu
    written: Written = Written.NOTHING
    indexing: bool = False
    """Whether every CPU tensor is an index of a subscript, where PyTorch itself lets
    CPU tensors meet CUDA tensors."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One row. A field that is None fits every call; the first row that fits rules."""

    mix: Mix | None = None
    cuda: bool | None = None
    cpu: Cpu | None = None
    written: Written | None = None
    indexing: bool | None = None
    compute: Compute
    result: Result
    source: Source
    why: str

    def fits(self, operands: Operands) -> bool:
        """Whether every field that is given equals the call's."""
        return all(
            wanted is None or wanted == met
            for wanted, met in (
                (self.mix, operands.mix),
                (self.cuda, operands.cuda),
                (self.cpu, operands.cpu),
                (self.written, operands.written),
                (self.indexing, operands.indexing),
            )
        )


RULES: tuple[Rule, ...] = (
    Rule(
        written=Written.CPU,
        cuda=True,
        compute=Compute.REFUSE,
        result=Result.NONE,
        source=Source.PYTORCH,
        why="no GPU may write a CPU tensor, and no CPU may read a CUDA tensor",
    ),
    Rule(
        written=Written.CPU,
        compute=Compute.HOST,
        result=Result.WRITTEN,
        source=Source.OURS,
        why="what is written lies on the host, and the host reads unified memory",
    ),
    Rule(
        cuda=True,
        cpu=Cpu.TENSORS,
        indexing=False,
        compute=Compute.REFUSE,
        result=Result.NONE,
        source=Source.PYTORCH,
        why="a unified operand does not make a CPU tensor meet a CUDA tensor",
    ),
    Rule(
        cuda=True,
        written=Written.NOTHING,
        compute=Compute.GPU,
        result=Result.CUDA,
        source=Source.SECTION_4_4_3,
        why="with a CUDA operand only a GPU can compute",
    ),
    Rule(
        cuda=True,
        compute=Compute.GPU,
        result=Result.WRITTEN,
        source=Source.SECTION_4_4_3,
        why="with a CUDA operand only a GPU can compute",
    ),
    Rule(
        mix=Mix.HOST,
        written=Written.NOTHING,
        compute=Compute.HOST,
        result=Result.UNIFIED,
        source=Source.SECTION_4_4_3,
        why="host affinity alone: the host computes, the result stays unified",
    ),
    Rule(
        mix=Mix.HOST,
        compute=Compute.HOST,
        result=Result.WRITTEN,
        source=Source.SECTION_4_4_3,
        why="host affinity alone: the host computes in place",
    ),
    Rule(
        mix=Mix.GPU,
        cpu=Cpu.TENSORS,
        written=Written.NOTHING,
        compute=Compute.GPU,
        result=Result.CUDA,
        source=Source.TABLE_4_1,
        why="hybrid operands: the CPU tensor is sent, the unified one is read in place",
    ),
    Rule(
        mix=Mix.GPU,
        written=Written.NOTHING,
        compute=Compute.GPU,
        result=Result.CUDA,
        source=Source.SECTION_4_4_3,
        why="GPU affinity alone: the GPU computes, the result is its own",
    ),
    Rule(
        mix=Mix.GPU,
        compute=Compute.GPU,
        result=Result.WRITTEN,
        source=Source.SECTION_4_4_3,
        why="GPU affinity alone: the GPU computes in place, over the link",
    ),
    Rule(
        mix=Mix.BOTH,
        written=Written.NOTHING,
        compute=Compute.GPU,
        result=Result.CUDA,
        source=Source.OURS,
        why="one GPU-affine operand wins: its result is awaited on the GPU",
    ),
    Rule(
        mix=Mix.BOTH,
        compute=Compute.GPU,
        result=Result.WRITTEN,
        source=Source.OURS,
        why="one GPU-affine operand wins: the GPU computes in place",
    ),
)


def mix_of(affinities: Iterable[Affinity]) -> Mix:
    """The mix of at least one affinity."""
    met = set(affinities)
    if len(met) == 2:
        return Mix.BOTH
    return Mix.HOST if met == {Affinity.HOST} else Mix.GPU


@functools.cache
def rule_for(operands: Operands) -> Rule:
    """The first row that fits; the table covers every call."""
    for rule in RULES:
        if rule.fits(operands):
            return rule
    raise LookupError(f"no placement rule fits {operands}")
