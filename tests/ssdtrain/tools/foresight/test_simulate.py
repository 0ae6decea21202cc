"""Closed forms: host, device, late ranks, collectives, copies, pipelines."""

import random

import pytest

from ssdtrain.errors import ConfigError
from ssdtrain.tools.foresight.graph import Stream
from ssdtrain.tools.foresight.pipeline import ChunkTimes, pipeline_tasks, schedule
from ssdtrain.tools.foresight.simulate import KERNEL_GAP_US, Task, simulate

COMM = Stream.COMMUNICATION


def reduced(late_us: float, dependent: bool) -> list[Task]:
    """Backward, an all-reduce, and compute that does or does not need its result."""
    return [
        Task(name="backward", device_us=100.0 + late_us),
        Task(name="reduce", device_us=40.0, stream=COMM, group="reduce", after=(0,)),
        Task(name="more", device_us=60.0, after=(1,) if dependent else ()),
    ]


def test_a_late_rank_holds_the_others_at_a_collective() -> None:
    times = simulate([reduced(0.0, True), reduced(500.0, True)])
    for rank in times.ranks:
        assert rank.step_us == pytest.approx(100 + 500 + 40 + 60)
    assert times.ranks[0].waited_us == pytest.approx(500.0)
    assert times.ranks[1].waited_us == pytest.approx(0.0)


def test_compute_that_does_not_need_a_collective_overlaps_it() -> None:
    times = simulate([reduced(0.0, False)] * 2)
    assert times.step_us == pytest.approx(100 + KERNEL_GAP_US + 60)
    late = simulate([reduced(0.0, False), reduced(500.0, False)])
    assert late.ranks[0].step_us == pytest.approx(640.0)  # its reduce, not its compute


def test_ranks_that_disagree_on_the_order_of_collectives_are_told_so() -> None:
    def rank(*groups: str) -> list[Task]:
        return [Task(name=g, device_us=1.0, stream=COMM, group=g) for g in groups]

    with pytest.raises(ConfigError, match="wait for one another"):
        simulate([rank("a", "b"), rank("b", "a")])
    with pytest.raises(ConfigError, match="every signal"):
        simulate([[Task(name="x", device_us=1.0, waits_for=("never",))]])


def test_the_order_in_which_ranks_are_given_does_not_matter() -> None:
    rng = random.Random(3)
    ranks = []
    for _ in range(5):
        tasks = []
        for number in range(20):
            tasks.append(Task(name="c", host_us=2, device_us=rng.uniform(1, 50)))
            reduce = Task(
                name="r", device_us=5.0, stream=COMM, group=number, after=(2 * number,)
            )
            tasks.append(reduce)
        ranks.append(tasks)
    forwards = simulate(ranks)
    backwards = simulate(ranks[::-1])
    assert [r.step_us for r in forwards.ranks] == pytest.approx(
        [r.step_us for r in backwards.ranks][::-1]
    )


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("micro_batches", [1, 4, 8, 16])
def test_1f1b_has_the_known_bubble(stages: int, micro_batches: int) -> None:
    """(m + p - 1) (forward + backward), without sends."""
    chunks = [[ChunkTimes(forward_us=1000.0, backward_us=2000.0)]] * stages
    step = simulate(pipeline_tasks(chunks, micro_batches)).step_us
    expected = (micro_batches + stages - 1) * 3000.0
    assert step == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_interleaving_divides_the_bubble(chunks: int) -> None:
    """(v m + p - 1) (forward + backward) / v."""
    stages, micro_batches = 4, 8
    times = ChunkTimes(forward_us=1000.0 / chunks, backward_us=2000.0 / chunks)
    step = simulate(pipeline_tasks([[times] * chunks] * stages, micro_batches)).step_us
    expected = (chunks * micro_batches + stages - 1) * 3000.0 / chunks
    assert step == pytest.approx(expected, rel=0.02)


def test_every_micro_batch_runs_once_in_each_direction_on_each_chunk() -> None:
    for rank in range(4):
        order = schedule(rank, 4, 8, 3)
        assert len(order) == len(set(order)) == 2 * 8 * 3


def test_interleaving_refuses_a_remainder() -> None:
    with pytest.raises(ConfigError, match="multiples of 4"):
        schedule(0, 4, 6, 2)
