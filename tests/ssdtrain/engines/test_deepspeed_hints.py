"""What DeepSpeed's pipeline schedule tells the cache, instruction by instruction."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ssdtrain.engines import deepspeed
from ssdtrain.engines.hints import Stage
from ssdtrain.engines.patch import Patches

schedules = pytest.importorskip("deepspeed.runtime.pipe.schedule")


class Heard:
    """Hints that write down what they are told, beside what the engine does."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    @contextmanager
    def forward(self, *, micro_batch: int | None) -> Iterator[None]:
        self.events.append(("forward begins", micro_batch))
        yield
        self.events.append(("forward ends", micro_batch))

    def set_stage(self, stage: Stage, *, micro_batch: int | None) -> None:
        self.events.append(("stage", stage, micro_batch))

    def set_next_stage(self, stage: Stage, *, micro_batch: int | None) -> None:
        self.events.append(("next", stage, micro_batch))

    def prefetch_last_module(self) -> None:
        self.events.append(("prefetch",))

    def wait_io(self) -> None:
        self.events.append(("wait",))

    def step_end(self) -> None:
        self.events.append(("step end",))


class Engine:
    """Runs a schedule as `PipelineEngine` does, on instructions that do nothing."""

    module = object()

    def __init__(self, heard: Heard) -> None:
        self._heard = heard
        kinds = [
            kind
            for kind in vars(schedules).values()
            if isinstance(kind, type)
            and issubclass(kind, schedules.PipeInstruction)
            and not kind.__subclasses__()
        ]
        self._INSTRUCTION_MAP = {kind: self._of(kind.__name__) for kind in kinds}

    def _of(self, name: str) -> Any:
        def run(engine: "Engine", **kwargs: Any) -> None:
            self._heard.events.append((name,))

        return run

    def _exec_schedule(self, pipe_schedule: Any) -> None:
        for commands in pipe_schedule.steps():
            for command in commands:
                self._INSTRUCTION_MAP[type(command)](self, **command.kwargs)

    def _exec_forward_pass(self, buffer_id: int) -> None: ...

    def _exec_backward_pass(self, buffer_id: int) -> None: ...


def events_of(stage_id: int, num_micro_batches: int) -> list[tuple[Any, ...]]:
    heard = Heard()
    engine, patches = Engine(heard), Patches()
    deepspeed.attach_pipeline(engine, heard, patches)  # type: ignore[arg-type]
    for _ in range(2):  # the second batch counts from 0 again
        heard.events.clear()
        engine._exec_schedule(
            schedules.TrainSchedule(
                micro_batches=num_micro_batches, stages=2, stage_id=stage_id
            )
        )
    events = list(heard.events)
    patches.undo()
    heard.events.clear()
    engine._exec_schedule(
        schedules.TrainSchedule(micro_batches=1, stages=2, stage_id=stage_id)
    )
    assert all(len(event) == 1 for event in heard.events), "still told after close"
    return events


COMMUNICATION = [(name,) for name in deepspeed.COMMUNICATION]


@pytest.mark.parametrize("num_micro_batches", [1, 3, 5])
@pytest.mark.parametrize("stage_id", [0, 1])
def test_a_transfer_is_preceded_by_a_prefetch_of_what_follows(
    stage_id: int, num_micro_batches: int
) -> None:
    """Algorithm 5.1: while the rank waits for its neighbour, what the next backward
    asks for first is loaded."""
    events = events_of(stage_id, num_micro_batches)
    passes = {("ForwardPass",): Stage.FORWARD, ("BackwardPass",): Stage.BACKWARD}
    seen = {Stage.FORWARD: 0, Stage.BACKWARD: 0}
    num_transfers = 0
    told: tuple[Any, ...] = ()
    for at, event in enumerate(events):
        if event[0] == "next":
            told = event
        if event in passes:
            seen[passes[event]] += 1
        if event not in COMMUNICATION:
            continue
        num_transfers += 1
        assert events[at - 1] == ("prefetch",), event
        coming = next(
            (
                e
                for e in events[at:]
                if len(e) == 1 and e in [*passes, ("ReduceGrads",)]
            ),
            None,
        )
        if coming in passes:
            stage = passes[coming]
            assert told == ("next", stage, seen[stage]), (at, event)
    assert num_transfers == 2 * num_micro_batches
    prefetches = sum(event == ("prefetch",) for event in events)
    assert prefetches == num_transfers


@pytest.mark.parametrize("stage_id", [0, 1])
def test_a_backward_is_followed_by_its_wait(stage_id: int) -> None:
    """Buffers of what was written become free before the next instruction runs."""
    events = events_of(stage_id, 4)
    backwards = [at for at, event in enumerate(events) if event == ("BackwardPass",)]
    assert len(backwards) == 4
    assert all(events[at + 1] == ("wait",) for at in backwards)
    assert sum(event == ("wait",) for event in events) == 4


@pytest.mark.parametrize("stage_id", [0, 1])
def test_forwards_are_named_and_steps_end(stage_id: int) -> None:
    events = events_of(stage_id, 4)
    begun = [event for event in events if event[0] == "forward begins"]
    assert begun == [("forward begins", number) for number in range(4)]
    for number, event in enumerate(begun):
        at = events.index(event)
        assert events[at + 1 : at + 3] == [("ForwardPass",), ("forward ends", number)]
        assert ("stage", Stage.FORWARD, number) in events[:at]
    stages = [event[1:] for event in events if event[0] == "stage"]
    backwards = [number for stage, number in stages if stage is Stage.BACKWARD]
    assert backwards == [0, 1, 2, 3]
    assert events[-1] == ("step end",) and events.count(("step end",)) == 1
    assert (Stage.OPTIMIZER, None) in stages
