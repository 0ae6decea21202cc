"""How threads walk over the adjacency lists of a frontier, and what that reads."""

import enum
from dataclasses import dataclass


class Walk(enum.Enum):
    """See [Note: Four ways to walk] in visit.cu. The first three are EMOGI's."""

    NAIVE = "naive"  # one thread a list
    MERGED = "merged"  # one warp a list, from its first element
    ALIGNED = "aligned"  # one warp a list, from the line before its first element
    LINES = "lines"  # every line of a sorted frontier once, dealt out evenly


class Direction(enum.Enum):
    """Which side of the frontier breadth-first search reads."""

    AUTO = "auto"  # whichever is predicted to read fewer lines, level by level
    FORWARD = "forward"  # the lists of the frontier
    BACKWARD = "backward"  # the lists of the nodes not reached yet, each until a hit


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one pass over a frontier read. `Trace` collects them."""

    operation: str
    num_nodes: int
    num_edges: int
    """Edges of the frontier's lists; of a backward step those it may have read."""

    bytes_read: int
    """From the edge list and the weights, hot blocks included: the sectors of 32 bytes
    that lists touch, each once, which is what `Walk.LINES` reads and the least for the
    other walks; of backward steps those that were read."""

    seconds: float
    """Of the kernel alone, where the trace is timed; 0.0 otherwise."""

    walked_seconds: float
    """The same with what prepares the frontier."""


class Trace:
    """Pass one as ``trace`` to a traversal to learn what its steps read."""

    def __init__(self, *, timed: bool = False) -> None:
        """``timed``: wait for the device after each step to take its time."""
        self.timed = timed
        self.steps: list[Step] = []
        self.converged: bool | None = None
        """Whether `pagerank` has reached its tolerance; None where nothing iterates."""

    def add(self, step: Step) -> None:
        """Take what one step has read."""
        self.steps.append(step)

    @property
    def bytes_read(self) -> int:
        return sum(step.bytes_read for step in self.steps)

    @property
    def num_edges(self) -> int:
        return sum(step.num_edges for step in self.steps)
