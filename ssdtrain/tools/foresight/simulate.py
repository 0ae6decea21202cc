"""Runs the tasks of one or several ranks on their queues and gives the step's time.

[Note: tasks on queues]
Every rank has the queues of `queues.py`. A task starts on its stream when the host has
launched it, the stream is free and what it depends on has ended (Lin 2023, Algorithms
3 and 4: `max(stream + gap, cpu + T4 / 2)`). A task of a group (a collective, or a send
with its receive) starts on all ranks of the group when the last of them is ready. A
task that waits for a signal starts some time after the task of another rank that gives
it has ended (a send that nobody waits for). The host goes on at once, except after a
task that it waits for. Where ranks share a wire, whoever prices their copies divides
its bandwidth.
(tests/ssdtrain/tools/foresight/test_simulate.py)
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from ssdtrain.curves import Links
from ssdtrain.errors import ConfigError
from ssdtrain.queues import Queue, Rank
from ssdtrain.tools.foresight.graph import Stream

# Between two kernels of one stream that wait for nothing.
KERNEL_GAP_US = 1.0


@dataclass(frozen=True, kw_only=True)
class Task:
    """Work of one rank: host time, and device time on one stream."""

    name: str
    host_us: float = 0.0
    """Before the launch, the launch itself included (T1 + T2 + T4)."""
    host_after_us: float = 0.0
    """After the first launch, until the host can go on (T5, T3)."""
    device_us: float = 0.0
    """0: nothing is launched."""
    stream: Stream = Stream.COMPUTE
    after: tuple[int, ...] = ()
    """Indices of earlier tasks of this rank that have to end first."""
    group: Hashable = None
    """Tasks of several ranks with one group run together."""
    signal: Hashable = None
    """What other ranks may wait for: given when the task has ended."""
    signal_us: float = 0.0
    """Until the signal arrives there."""
    waits_for: tuple[Hashable, ...] = ()
    """Signals of other ranks."""
    host_waits: bool = False
    """The host goes on when the task has ended."""


@dataclass
class RankTimes:
    """What one rank did. Microseconds since the step's start."""

    step_us: float = 0.0
    host_us: float = 0.0
    """When the host had launched everything."""
    busy_us: dict[Stream, float] = field(default_factory=dict)
    """Device time of each stream."""
    waited_us: float = 0.0
    """Time that groups spent waiting for their last rank."""
    ends_us: list[float] = field(default_factory=list)
    """When each task ended."""


@dataclass(frozen=True, kw_only=True)
class SimulatedStep:
    """A simulated step."""

    ranks: tuple[RankTimes, ...]

    @property
    def step_us(self) -> float:
        """The last rank's."""
        return max((rank.step_us for rank in self.ranks), default=0.0)


class _Runner:
    """Runs one rank's tasks, in order."""

    def __init__(
        self, tasks: Sequence[Task], signals: dict[Hashable, float], queues: Rank
    ) -> None:
        self.tasks = tasks
        self._signals = signals
        self.at = 0
        self.times = RankTimes()
        self._rank = rank = queues
        self._queues: dict[Stream, Queue] = {
            Stream.COMPUTE: rank.compute,
            Stream.COMMUNICATION: rank.communication,
            Stream.COPY_OUT: rank.d2h,
            Stream.COPY_IN: rank.h2d,
            Stream.SSD_WRITE: rank.ssd_write,
            Stream.SSD_READ: rank.ssd_read,
            Stream.SIDE: Queue(KERNEL_GAP_US),
        }

    @property
    def done(self) -> bool:
        return self.at == len(self.tasks)

    @property
    def task(self) -> Task:
        return self.tasks[self.at]

    def missing(self) -> Hashable:
        """A signal that the present task waits for and nobody has given yet."""
        return next((s for s in self.task.waits_for if s not in self._signals), None)

    def ready_us(self) -> float:
        """When the present task could start, were its group there."""
        return self._ready_us(self._rank.host + self.task.host_us)

    def run(self, start: float, length: float) -> None:
        """The present task, from `start` on its stream and for `length`."""
        task, rank = self.task, self._rank
        launched = rank.host + task.host_us
        rank.host = launched + task.host_after_us
        end = launched
        if length > 0.0 or task.group is not None or task.waits_for:
            self.times.waited_us += start - self._ready_us(launched)
            if task.stream is Stream.COMPUTE:
                end = rank.run(start, length)
            elif task.stream is Stream.COMMUNICATION:
                end = rank.collective(start, length)
            else:
                end = self._queues[task.stream].serve(start, length)
        if task.signal is not None:
            self._signals[task.signal] = end + task.signal_us
        if task.host_waits:
            rank.host = max(rank.host, end)
        self.times.ends_us.append(end)
        self.times.step_us = max(self.times.step_us, end, rank.host)
        self.times.host_us = rank.host
        self.at += 1

    def close(self) -> RankTimes:
        """What the rank did."""
        self.times.busy_us = {s: queue.busy for s, queue in self._queues.items()}
        return self.times

    def _ready_us(self, launched: float) -> float:
        task, start = self.task, launched
        for earlier in task.after:
            start = max(start, self.times.ends_us[earlier])
        for signal in task.waits_for:
            start = max(start, self._signals[signal])
        return max(start, self._queues[task.stream].free)


def simulate_ranks(
    ranks: Sequence[Sequence[Task]],
    links: Links | None = None,
    collective_slowdown: float = 0.0,
) -> SimulatedStep:
    """Run every rank's tasks, by [Note: tasks on queues]; `links`: how transfers hinder
    one another. Raises ConfigError: ranks wait in a circle, for a task that is not
    there or not earlier, or a time is no number of 0 or more."""
    for tasks in ranks:
        _check_tasks(tasks)
    signals: dict[Hashable, float] = {}
    states = [
        _Runner(tasks, signals, Rank(links, KERNEL_GAP_US, collective_slowdown))
        for tasks in ranks
    ]
    members = Counter(
        task.group for tasks in ranks for task in tasks if task.group is not None
    )
    arrived: dict[Hashable, list[_Runner]] = {}
    listening: dict[Hashable, list[_Runner]] = {}
    moving = list(states)
    while moving:
        rank = moving.pop()
        if rank.done:
            continue
        missing = rank.missing()
        if missing is not None:
            listening.setdefault(missing, []).append(rank)
            continue
        together = [rank]
        group = rank.task.group
        if group is not None:
            together = arrived.setdefault(group, [])
            together.append(rank)
            if len(together) < members[group]:
                continue
            del arrived[group]
        _run_together(together)
        for other in together:
            moving += listening.pop(other.tasks[other.at - 1].signal, ())
        moving += together
    _check_done(states)
    return SimulatedStep(ranks=tuple(state.close() for state in states))


def _check_tasks(tasks: Sequence[Task]) -> None:
    for index, task in enumerate(tasks):
        if task.after and not 0 <= min(task.after) <= max(task.after) < index:
            raise ConfigError(
                f"task {index} ({task.name}) expects to wait for earlier tasks of its "
                f"rank, got {task.after}"
            )
        if not task.host_us + task.host_after_us + task.device_us >= 0.0:
            raise ConfigError(
                f"task {index} ({task.name}) expects times of 0 or more, got "
                f"{task.host_us}, {task.host_after_us} and {task.device_us} us"
            )


def _check_done(states: Sequence[_Runner]) -> None:
    stuck = [state for state in states if not state.done]
    if stuck:
        raise ConfigError(
            f"{len(stuck)} ranks wait for one another, the first at task "
            f"{stuck[0].at} ({stuck[0].task.name}); every rank of a group runs its "
            "tasks in one order, and every signal that is waited for is given."
        )


def _run_together(ranks: Sequence[_Runner]) -> None:
    """Run the present tasks of a group: from the last rank's start, for the longest."""
    start = max(rank.ready_us() for rank in ranks)
    length = max(rank.task.device_us for rank in ranks)
    for rank in ranks:
        rank.run(start, length)
