"""A training step as one CUDA graph.

[Note: captured steps] On a small graph a step's time is the host's: tens of launches,
each a few microseconds. Where shapes and the graph are fixed, everything that a step
launches (forward, backward, optimizer) is captured once and replayed by one call. What
the step reads must stay where it is: parameters, graph and inputs are changed in place.

[Note: padded batches] Of mini-batches no two have the same sizes. A batch is copied
into memory of the next larger one of a few sizes (8 between a number and its double);
after the real nodes and edges lie spare ones, which join nobody but one another.
Nothing that a seed's result or a gradient depends on reads them: their rows get no
gradient, and a row without a gradient adds zeros to that of a weight. The graph is made
of that memory inside the captured step, so a replay sorts the new edges as well.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hector.graph import HeteroGraph, padded_subgraph
from hector.sampling import Drawn, NeighborSampler, SampledBatch

WARM_UP = 3
"""Calls before the capture: they compile, allocate and run as they are."""


class CapturedStep:
    """Run `step()` as one CUDA graph; see [Note: captured steps].

    The first calls run the step itself, so every call is one step. Results are the
    tensors of the last call: clone what is to be kept. Random numbers go on from call
    to call as without a capture. An optimizer needs `capturable=True`, and gradients
    `zero_grad(set_to_none=True)` inside the step.
    """

    def __init__(self, step: Callable[[], Any], warm_up: int = WARM_UP) -> None:
        if warm_up < 1:
            raise ValueError(f"expected warm_up of at least 1, got {warm_up}")
        if not torch.cuda.is_available():
            raise ValueError("expected a CUDA device to capture a step on, got none")
        self._step, self._left = step, warm_up
        self._graph: torch.cuda.CUDAGraph | None = None
        self._results: Any = None

    def __call__(self) -> Any:
        """Run one step."""
        if self._left:
            self._left -= 1
            return self._aside()
        if self._graph is None:
            # Capturing launches nothing: the replay below is this call's step.
            captured = torch.cuda.CUDAGraph()
            # Threads that draw and gather go on allocating and waiting meanwhile.
            with torch.cuda.graph(captured, capture_error_mode="thread_local"):
                self._results = self._step()
            self._graph = captured
        self._graph.replay()
        return self._results

    def _aside(self) -> Any:
        """Run the step on a stream of its own, as captures want their warm-up."""
        here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            found = self._step()
        here.wait_stream(aside)
        return found


def padded_size(count: int) -> int:
    """Return the next larger one of 8 sizes an octave; at least 64."""
    step = max(8, 1 << max(count.bit_length() - 4, 0))
    return max(64, -(-count // step) * step)


class CapturedSampler:
    """Draw what a `NeighborSampler` draws, from so many seeds, as one CUDA graph.

    A draw is a hundred small operations, and waits for the device at every hop; as a
    graph it is one launch and waits once, to learn its sizes. It has room for as many
    edges as there can be. Other numbers of seeds, all neighbours of a node, fanouts of
    relations and draws of more than `MOST` edges go to the sampler as they are; on a
    CPU the operations of the graph run.
    """

    MOST = 1 << 22
    """Edges: with more the host's time matters less than the spare room's."""

    def __init__(self, sampler: NeighborSampler, num_seeds: int) -> None:
        """Capture for `num_seeds` seeds; while it does, no other thread may capture."""
        graph = sampler.graph
        self.sampler, self.num_seeds = sampler, num_seeds
        self._run: Callable[[], tuple[Tensor, ...]] | None = None
        most = sampler.most_drawn(num_seeds)
        fits = most is not None and most <= self.MOST and num_seeds <= graph.num_nodes
        if not fits or not num_seeds or not graph.num_edges:
            return
        self._seeds = torch.arange(num_seeds, device=graph.device)
        self._key = torch.zeros((), dtype=torch.int64, device=graph.device)
        # Not a method of this object, which would then refer to itself.
        self._run = partial(sampler.draw_padded, self._seeds, self._key)
        if graph.device.type == "cuda":
            self._run = CapturedStep(self._run)
            for _ in range(WARM_UP + 1):
                self._run()

    @property
    def has_room(self) -> bool:
        """Whether draws from `num_seeds` seeds have fixed sizes."""
        return self._run is not None

    def draw(self, seeds: Tensor, generator: torch.Generator | None = None) -> Drawn:
        """Draw as `NeighborSampler.draw` does; the edges' order is another."""
        if self._run is None or seeds.numel() != self.num_seeds:
            return self.sampler.draw(seeds, generator)
        self._seeds.copy_(seeds)
        self._key.copy_(self.sampler.key(generator))
        node_ids, edge_ids, places, sizes = self._run()
        nodes, edges = sizes.tolist()
        # The next draw writes to the same memory.
        return Drawn(node_ids[:nodes].clone(), edge_ids[:edges].clone(), places.clone())


class CapturedBatches:
    """Run training steps on mini-batches, one CUDA graph for each of a few sizes.

    `step(batch, *tensors, *rows)` gets a `SampledBatch` with spare nodes and edges
    after the real ones ([Note: padded batches]) and must look at nothing but its
    arguments and what stays in place. On a CPU steps run as they are, padded the same.
    """

    def __init__(
        self, step: Callable[..., Any], graph: HeteroGraph, max_sizes: int = 8
    ) -> None:
        """Keep at most `max_sizes` graphs; the least recently used one leaves."""
        if max_sizes < 1:
            raise ValueError(f"expected max_sizes of at least 1, got {max_sizes}")
        self.step, self.graph, self.max_sizes = step, graph, max_sizes
        self._sizes: OrderedDict[Hashable, _Padded] = OrderedDict()

    def __len__(self) -> int:
        """Return how many sizes are kept."""
        return len(self._sizes)

    def __call__(
        self, drawn: Drawn, *tensors: Tensor, rows: Sequence[Tensor] = ()
    ) -> Any:
        """Run one step on what was drawn from the graph, on `tensors`, whose shapes
        decide the size as well, and on `rows` [drawn nodes, ...], zeros after them.
        Results are overwritten by later steps."""
        nodes = padded_size(drawn.node_ids.numel() + 1)
        edges = padded_size(drawn.edge_ids.numel())
        kinds = tuple((t.shape, t.dtype) for t in (drawn.seeds, *tensors))
        rest = tuple((t.shape[1:], t.dtype) for t in rows)
        key = (nodes, edges, kinds, rest)
        found = self._sizes.pop(key, None)
        if found is None:
            room = _Room(self.graph, (nodes, edges), drawn.seeds, tensors, rows)
            found = _Padded(room, self._step_on(room))
        self._sizes[key] = found
        while len(self._sizes) > self.max_sizes:
            self._sizes.popitem(last=False)
        found.room.fill(drawn, tensors, rows)
        return found.run()

    def _step_on(self, room: "_Room") -> Callable[[], Any]:
        step = self.step

        def run() -> Any:
            return step(room.batch(), *room.tensors, *room.rows)

        return CapturedStep(run) if self.graph.device.type == "cuda" else run


class _Room:
    """Hold memory for batches of one size, and the batch that lies in it."""

    def __init__(
        self,
        graph: HeteroGraph,
        sizes: tuple[int, int],
        seeds: Tensor,
        tensors: Sequence[Tensor],
        rows: Sequence[Tensor],
    ) -> None:
        """Make room for `sizes` (nodes, edges); `seeds`, `tensors` and `rows` are of
        the shapes of a batch's."""
        nodes, edges = sizes
        device = graph.device
        self._graph = graph
        self._beyond = graph.num_nodes + torch.arange(nodes, device=device)
        self._node_ids = self._beyond.clone()
        self._edge_ids = torch.full((edges,), -1, device=device)
        self._num_nodes = torch.zeros((), dtype=torch.int64, device=device)
        self._seeds = torch.empty_like(seeds, device=device)
        self.tensors = tuple(torch.empty_like(t, device=device) for t in tensors)
        self.rows = tuple(
            torch.zeros(nodes, *r.shape[1:], dtype=r.dtype, device=device) for r in rows
        )

    def fill(
        self, drawn: Drawn, tensors: Sequence[Tensor], rows: Sequence[Tensor]
    ) -> None:
        """Copy a batch; nothing waits for the device."""
        nodes, edges = drawn.node_ids.numel(), drawn.edge_ids.numel()
        self._node_ids[:nodes].copy_(drawn.node_ids)
        self._node_ids[nodes:].copy_(self._beyond[nodes:])
        self._edge_ids[:edges].copy_(drawn.edge_ids)
        self._edge_ids[edges:].fill_(-1)
        self._num_nodes.fill_(nodes)
        self._seeds.copy_(drawn.seeds)
        for mine, given in zip(self.tensors, tensors, strict=True):
            mine.copy_(given, non_blocking=True)
        for mine, given in zip(self.rows, rows, strict=True):
            mine[:nodes].copy_(given, non_blocking=True)
            mine[nodes:].zero_()

    def batch(self) -> SampledBatch:
        """Return the batch as a `SampledBatch` with spare nodes and edges."""
        graph = self._graph
        made = padded_subgraph(graph, self._node_ids, self._edge_ids, self._num_nodes)
        # Spare nodes read the last node's features.
        known = self._node_ids.clamp(max=graph.num_nodes - 1)
        return SampledBatch(made, known, self._seeds, self._edge_ids)


class _Padded(NamedTuple):
    """Run the step on the batches of one size.

    `run` refers to the room and the room to neither: all of it goes with its owner.
    """

    room: _Room
    run: Callable[[], Any]
