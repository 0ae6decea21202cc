"""Pipeline schedules as tasks: 1F1B and its interleaved form, over several ranks. Rank
r of p holds the model chunks r, r + p, r + 2p...; only the next chunk waits for a
send."""

from collections.abc import Sequence
from dataclasses import dataclass

from ssdtrain.errors import ConfigError
from ssdtrain.tools.foresight.simulate import Task


@dataclass(frozen=True, kw_only=True)
class ChunkTimes:
    """Device time of one micro-batch on one model chunk."""

    forward_us: float
    backward_us: float


@dataclass(frozen=True)
class Turn:
    """One entry of a rank's schedule."""

    is_forward: bool
    micro_batch: int
    chunk: int
    """Of this rank: 0 to `num_chunks` - 1."""


def pipeline_schedule(
    rank: int, num_ranks: int, num_micro_batches: int, num_chunks: int = 1
) -> list[Turn]:
    """The order of forwards and backwards on one rank (Narayanan et al. 2021). Raises
    ConfigError: interleaving needs micro-batches in multiples of the ranks."""
    if num_chunks > 1 and num_micro_batches % num_ranks:
        raise ConfigError(
            f"interleaving expects micro-batches in multiples of {num_ranks} stages, "
            f"got {num_micro_batches}"
        )
    total = num_micro_batches * num_chunks
    warm = num_ranks - rank - 1
    if num_chunks > 1:
        warm = 2 * warm + (num_chunks - 1) * num_ranks
    warm = min(warm, total)

    def turn(number: int, is_forward: bool) -> Turn:
        if num_chunks == 1:
            return Turn(is_forward, number, 0)
        round_, within = divmod(number, num_ranks * num_chunks)
        chunk = within // num_ranks
        micro_batch = round_ * num_ranks + within % num_ranks
        chunk = chunk if is_forward else num_chunks - 1 - chunk
        return Turn(is_forward, micro_batch, chunk)

    forwards = [turn(i, True) for i in range(total)]
    backwards = [turn(i, False) for i in range(total)]
    order = forwards[:warm]
    for i in range(total - warm):
        order += [forwards[warm + i], backwards[i]]
    return order + backwards[total - warm :]


def pipeline_tasks(
    chunks: Sequence[Sequence[ChunkTimes]],
    num_micro_batches: int,
    send_us: float = 0.0,
    tail_us: float = 0.0,
) -> list[list[Task]]:
    """Tasks of every rank, by the times of its model chunks; `tail_us`: after the last
    backward (the optimizer). Raises ConfigError: ranks differ in their number of chunks
    or have none, or a step has no micro-batch."""
    num_ranks = len(chunks)
    counts = {len(own) for own in chunks}
    if num_micro_batches < 1:
        raise ConfigError(f"a pipeline expects micro-batches, got {num_micro_batches}")
    if len(counts) != 1 or not all(counts):
        raise ConfigError(
            f"a pipeline expects as many chunks on each rank, got {sorted(counts)}"
        )
    num_chunks = counts.pop()
    orders = [
        pipeline_schedule(rank, num_ranks, num_micro_batches, num_chunks)
        for rank in range(num_ranks)
    ]
    ranks = []
    for rank, order in enumerate(orders):
        tasks = [
            _task(
                rank, turn, chunks[rank][turn.chunk], (num_ranks, num_chunks), send_us
            )
            for turn in order
        ]
        if tail_us:
            tasks.append(Task(name="tail", device_us=tail_us))
        ranks.append(tasks)
    return ranks


def _task(
    rank: int, turn: Turn, times: ChunkTimes, shape: tuple[int, int], send_us: float
) -> Task:
    """Signals are named by direction, micro-batch and model chunk, counted over all."""
    num_ranks, num_chunks = shape
    last = num_ranks * num_chunks - 1
    place = turn.chunk * num_ranks + rank
    if turn.is_forward:
        needed = [("forward", turn.micro_batch, place - 1)] if place else []
    elif place == last:
        needed = []  # its own forward, which runs before it on this rank
    else:
        needed = [("backward", turn.micro_batch, place + 1)]
    name = "forward" if turn.is_forward else "backward"
    return Task(
        name=name,
        device_us=times.forward_us if turn.is_forward else times.backward_us,
        signal=(name, turn.micro_batch, place),
        signal_us=send_us,
        waits_for=tuple(needed),
    )
