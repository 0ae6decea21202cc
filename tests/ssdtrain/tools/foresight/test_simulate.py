"""Closed forms: host, device, late ranks, collectives, copies, pipelines."""

import pytest

from ssdtrain.errors import ConfigError
from ssdtrain.tools.foresight.graph import Stream
from ssdtrain.tools.foresight.pipeline import (
    ChunkTimes,
    pipeline_schedule,
    pipeline_tasks,
)
from ssdtrain.tools.foresight.simulate import Task, simulate_ranks

COMM = Stream.COMMUNICATION


def test_ranks_that_disagree_on_the_order_of_collectives_are_told_so() -> None:
    def rank(*groups: str) -> list[Task]:
        return [Task(name=g, device_us=1.0, stream=COMM, group=g) for g in groups]

    with pytest.raises(ConfigError, match="wait for one another"):
        simulate_ranks([rank("a", "b"), rank("b", "a")])
    with pytest.raises(ConfigError, match="every signal"):
        simulate_ranks([[Task(name="x", device_us=1.0, waits_for=("never",))]])


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("micro_batches", [1, 4, 8, 16])
def test_1f1b_has_the_known_bubble(stages: int, micro_batches: int) -> None:
    """(m + p - 1) (forward + backward), without sends."""
    chunks = [[ChunkTimes(forward_us=1000.0, backward_us=2000.0)]] * stages
    step = simulate_ranks(pipeline_tasks(chunks, micro_batches)).step_us
    expected = (micro_batches + stages - 1) * 3000.0
    assert step == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_interleaving_divides_the_bubble(chunks: int) -> None:
    """(v m + p - 1) (forward + backward) / v."""
    stages, micro_batches = 4, 8
    times = ChunkTimes(forward_us=1000.0 / chunks, backward_us=2000.0 / chunks)
    step = simulate_ranks(
        pipeline_tasks([[times] * chunks] * stages, micro_batches)
    ).step_us
    expected = (chunks * micro_batches + stages - 1) * 3000.0 / chunks
    assert step == pytest.approx(expected, rel=0.02)


def test_every_micro_batch_runs_once_in_each_direction_on_each_chunk() -> None:
    for rank in range(4):
        order = pipeline_schedule(rank, 4, 8, 3)
        assert len(order) == len(set(order)) == 2 * 8 * 3


def test_interleaving_refuses_a_remainder() -> None:
    with pytest.raises(ConfigError, match="multiples of 4"):
        pipeline_schedule(0, 4, 6, 2)
