"""Layouts of a training step over GPUs. Ranks are numbered as Megatron does: tensor,
then context, then data parallelism, then pipeline stages; expert-parallel ranks are
neighbours among those that hold the same weights."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import product

from ssdtrain.tools.search.experts import Experts

SHORTEST = 2048
"""Tokens of a sequence that a rank has at least under context parallelism."""
MOST_CHUNKS = 8


class Division(Enum):
    """What of norms, residuals and their results a tensor-parallel rank saves."""

    NONE = "none"
    """All of it: no sequence parallelism."""
    SHARES = "shares"
    """Its share of everything; Megatron gathers it again for backward."""
    INPUTS_WHOLE = "inputs whole"
    """Its share, but what column-parallel layers read as they read it: DTensor."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained."""

    layers: int
    hidden: int
    tokens: int
    """Of a sequence."""
    batch: int
    """Sequences of a step, over all GPUs."""
    gpus: int
    keys: int = 0
    """Elements of a token's keys and values in a layer."""
    heads: int = 1
    words: int = 0
    """Of the vocabulary."""
    experts: Experts | None = None


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """How GPUs share a step."""

    data: int
    tensor: int
    pipeline: int
    zero: int
    """0 to 3: optimizer state, then gradients, then weights are divided, too."""
    sequences: int
    """Of a micro-batch."""
    way: str
    """How activations are kept."""
    context: int = 1
    """Ranks that share a sequence: each gathers the keys and values of the others."""
    expert: int = 1
    """Ranks, of those that hold the same weights, that share a layer's experts."""
    chunks: int = 1
    """Of a stage's layers, interleaved."""
    divided: bool = False
    """Sequence parallelism: norms and residuals are divided among tensor ranks."""

    @property
    def replicas(self) -> int:
        """Ranks that hold the same weights, experts left out."""
        return self.data * self.context

    def micro_batches(self, batch: int) -> int:
        """Return the micro-batches of one data-parallel rank."""
        return batch // (self.data * self.sequences)

    def flying(self, batch: int) -> float:
        """Return the micro-batches whose activations the first stage holds at most."""
        count = self.micro_batches(batch)
        if self.chunks == 1:
            return min(self.pipeline, count)
        warm = 2 * (self.pipeline - 1) + (self.chunks - 1) * self.pipeline + 1
        return min(warm, count * self.chunks) / self.chunks


def powers(most: int) -> list[int]:
    """Return 1, 2, 4 and so on."""
    return [1 << at for at in range(max(1, most).bit_length())]


def layouts(
    job: Job, degrees: Sequence[int], sequences: Sequence[int], ways: Sequence[str]
) -> Iterator[ParallelLayout]:
    """All layouts whose numbers divide."""
    contexts = powers(job.tokens // SHORTEST)
    for tensor, context in product(degrees, contexts):
        rest, odd = divmod(job.gpus, tensor * context)
        for pipeline in range(1, 0 if odd else min(job.layers, rest) + 1):
            if rest % pipeline or job.layers % pipeline:
                continue
            data = rest // pipeline
            levels = (0, 1, 2, 3) if pipeline == 1 else (0, 1)
            for zero, number, expert, chunks, divided, way in product(
                levels if data * context > 1 else (0,),
                [number for number in sequences if job.batch % (data * number) == 0],
                _expert_degrees(job, data * context),
                powers(MOST_CHUNKS) if pipeline > 1 else (1,),
                _divisions(job, tensor),
                ways,
            ):
                one = ParallelLayout(
                    data=data,
                    tensor=tensor,
                    pipeline=pipeline,
                    zero=zero,
                    sequences=number,
                    way=way,
                    context=context,
                    expert=expert,
                    chunks=chunks,
                    divided=divided,
                )
                if chunks == 1 or _interleaves(job, one):
                    yield one


def _expert_degrees(job: Job, replicas: int) -> list[int]:
    if job.experts is None:
        return [1]
    number = job.experts.number
    each = powers(min(number, replicas))
    return [one for one in each if number % one == 0 and replicas % one == 0]


def _divisions(job: Job, tensor: int) -> tuple[bool, ...]:
    """Experts under tensor parallelism expect sequence parallelism (Megatron)."""
    if tensor == 1:
        return (False,)
    return (True,) if job.experts is not None else (True, False)


def _interleaves(job: Job, one: ParallelLayout) -> bool:
    divides = job.layers % (one.pipeline * one.chunks) == 0
    return divides and one.micro_batches(job.batch) % one.pipeline == 0
