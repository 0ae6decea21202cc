"""Compiled programs of message passing, found by what they compute."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from hector.frontend.values import Sym
from hector.graph import HeteroGraph
from hector.message.functions import Side
from hector.message.traced import Trace
from hector.runtime import Compiled, Options

MAX_PROGRAMS = 256


class Facts:
    """Hold what a program or a trace is found by, with its hash.

    Facts are tuples as long as a program; a look-up that hashes them again is most of a
    small graph's call.
    """

    __slots__ = ("_hash", "value")

    def __init__(self, value: Hashable) -> None:
        self.value, self._hash = value, hash(value)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Facts) and self.value == other.value


@dataclass(frozen=True)
class CompiledPass:
    """Hold a compiled program."""

    compiled: Compiled
    sources: tuple[str, ...]
    """Name of each program input: `n:` node, `s:` source, `e:` edge feature, `t:`
    captured."""


@dataclass(frozen=True)
class Known:
    """Hold a trace of pure functions: valid where features have these shapes."""

    key: Facts
    reads: tuple[tuple[Side, str, tuple[int, ...]], ...]
    captured: Mapping[str, tuple[int, int]]
    """Position among the functions' tensors, and dropped axes, of each input."""
    names: tuple[str, ...]
    """Of the results."""
    alike: list[Any]
    """One list for all programs that differ in their inputs' names alone."""


class PassProgram(NamedTuple):
    """Hold a compiled program and what its inputs are."""

    compiled: Compiled
    inputs: Sequence[tuple[str, str]]
    """(kind, name) of each: "n" of nodes, "s" of sources, "e" of edges, "t" what
    functions read besides."""
    captured: Mapping[str, tuple[int, int]]
    """See `Known.captured`."""


class Programs:
    """Keep programs under one set of options; the least recently used one leaves first.

    Graphs share them: what was compiled for one graph serves the next one.
    """

    def __init__(
        self, options: Options | None = None, capacity: int = MAX_PROGRAMS
    ) -> None:
        self.options, self.capacity = options or Options(), capacity
        self._made: OrderedDict[Facts, CompiledPass] = OrderedDict()
        self._pure: OrderedDict[Facts, list[Known]] = OrderedDict()
        self._alike: dict[Facts, list[Any]] = {}

    def __len__(self) -> int:
        return len(self._made)

    def traces(self, facts: Facts) -> list[Known]:
        """Return what was traced of pure functions with these facts, to be added to."""
        found = self._pure.setdefault(facts, [])
        self._pure.move_to_end(facts)
        while len(self._pure) > self.capacity:
            self._pure.popitem(last=False)
        return found

    def alike(self, facts: Facts) -> list[Any]:
        """Return the list of equal facts."""
        if len(self._alike) >= self.capacity:
            self._alike.clear()
        return self._alike.setdefault(facts, [])

    def run(
        self,
        graph: HeteroGraph,
        key: Facts,
        build: Callable[[], tuple[Trace, Sequence[Sym]]],
        tensors: Callable[[str], Tensor],
    ) -> tuple[Tensor, ...]:
        """Run the program of `key`, built when it is new; `tensors` gives an input by
        its name."""
        made = self.made(key, build)
        return made.compiled(graph, [tensors(s) for s in made.sources])

    def made(
        self, key: Facts, build: Callable[[], tuple[Trace, Sequence[Sym]]]
    ) -> CompiledPass:
        """Return the program of `key`, built when it is new."""
        made = self._made.get(key)
        if made is None:
            made = self._make(*build())
            self._made[key] = made
            while len(self._made) > self.capacity:
                self._made.popitem(last=False)
        else:
            self._made.move_to_end(key)
        return made

    def _make(self, trace: Trace, results: Sequence[Sym]) -> CompiledPass:
        shapes = [_row_shape(r) for r in results]
        program = trace.program(results)
        compiled = Compiled(trace.builder, program, self.options, shapes)
        sources = tuple(trace.state.bound[n] for n in compiled.inputs)
        return CompiledPass(compiled, sources)


def _row_shape(s: Sym) -> tuple[int, ...]:
    return {1: (), 2: (s.node.type.width,)}.get(s.rank, s.node.shape)


SHARED = Programs()
"""Of graphs that were given none of their own: programs depend on no graph."""
