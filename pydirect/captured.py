"""Training steps that a GPU repeats without the host: padded batches, one CUDA graph.

[Note: Padding] A graph of kernels has fixed shapes, and batches have not. So a batch is
laid out with room to spare: after the seeds come rows that belong to no node, then the
nodes of each hop; after the edges of each hop come edges among those rows. PyG's
layers, which leave out hop after hop, then see the same sizes for every batch, and what
happens on the rows of no node reaches no seed. It would in a model that takes means
over all rows, as batch normalization does; such models are refused. Tests:
tests/pydirect/test_captured.py.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from pydirect.loader import MiniBatch

_SPARE_ROWS = 64
_ROUND = 256
_IGNORED = -100
_WARM_UPS = 3


@dataclass(frozen=True, kw_only=True)
class Room:
    """Sizes of a padded batch."""

    nodes: tuple[int, ...]
    """Rows of the seeds (with the spare ones) and of each hop."""

    edges: tuple[int, ...]
    """Edges of each hop."""

    @classmethod
    def around(cls, batch: MiniBatch, num_seeds: int) -> "Room":
        """Room for a batch and for others that are somewhat larger."""
        hops = batch.num_nodes_per_hop[1:]
        return cls(
            nodes=(num_seeds + _SPARE_ROWS, *(_with_slack(n) for n in hops)),
            edges=tuple(_with_slack(n) for n in batch.num_edges_per_hop),
        )

    def holds(self, batch: MiniBatch) -> bool:
        """Whether a batch fits."""
        ends = itertools.accumulate(batch.num_nodes_per_hop)
        shift = self.nodes[0] - batch.num_seeds
        rooms = itertools.accumulate(self.nodes)
        return (
            shift >= _SPARE_ROWS
            and len(batch.num_nodes_per_hop) == len(self.nodes)
            and all(end + shift <= room for end, room in zip(ends, rooms, strict=True))
            and all(
                n <= room
                for n, room in zip(batch.num_edges_per_hop, self.edges, strict=True)
            )
        )

    def grown(self, batch: MiniBatch, num_seeds: int) -> "Room":
        """Room for all that this holds, and a batch."""
        other = Room.around(batch, num_seeds)
        pairs = zip((self.nodes, self.edges), (other.nodes, other.edges), strict=True)
        nodes, edges = (
            tuple(max(a, b) for a, b in zip(x, y, strict=True)) for x, y in pairs
        )
        return Room(nodes=nodes, edges=edges)


class Recorder(Protocol):
    """Makes work repeatable."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """What to call instead of ``work`` from now on; ``work`` has run or not."""
        ...


class NoRecorder:
    """Does the work again each time: what a CPU does."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """See `Recorder.record`."""
        return work


class GraphRecorder:
    """Records a CUDA graph."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """See `Recorder.record`."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # The loader's threads go on allocating and waiting meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            work()
        return graph.replay


class CapturedStep:
    """Forward and backward of one network, on padded batches.

    Dropout draws other masks than without padding; losses otherwise agree to rounding.
    """

    def __init__(
        self,
        network: torch.nn.Module,
        num_seeds: int,
        recorder: Recorder | None = None,
    ) -> None:
        """
        Args:
            network: called as PyG's models are, with sampled nodes and edges a hop.
            num_seeds: of a batch, at most.
            recorder: None takes CUDA graphs on a GPU, and repeats the work elsewhere.

        Raises:
            ValueError: the network normalizes over all rows.
        """
        for name, module in network.named_modules():
            if isinstance(module, torch.nn.modules.batchnorm._NormBase):
                raise ValueError(
                    f"capture: expects a model whose rows do not meet, got "
                    f"{type(module).__name__} ({name}), whose statistics would count "
                    "the rows of padding: use LayerNorm, or set capture=false"
                )
        self._network = network
        self._num_seeds = num_seeds
        self._recorder = recorder
        self._room: Room | None = None
        self._parameters = [p for p in network.parameters() if p.requires_grad]
        self._gradients: list[torch.Tensor | None] = []
        self.num_recorded = 0
        """How often a graph was recorded: once, and again for larger batches."""

    def __call__(self, batch: MiniBatch) -> torch.Tensor:
        """Set the gradients of a batch's mean loss; returns the loss, shape ().

        The returned tensor is overwritten by the next call.
        """
        if self._room is None or not self._room.holds(batch):
            self._record(batch)
        else:
            self._fill(batch)
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        self._replay()
        return self._loss

    def _record(self, batch: MiniBatch) -> None:
        first = self._room is None
        self._room = (
            Room.around(batch, self._num_seeds)
            if self._room is None
            else self._room.grown(batch, self._num_seeds)
        )
        try:
            self._replay = self._recorded(batch, is_first=first)
        except BaseException:
            self._room = None  # what was recorded before is of other memory
            raise
        self.num_recorded += 1

    def _recorded(self, batch: MiniBatch, *, is_first: bool) -> Callable[[], None]:
        self._lay_out(batch)
        self._fill(batch)
        if is_first:
            self._check(batch)
        # Once without a graph: parameters that have no gradient keep none.
        for parameter in self._parameters:
            parameter.grad = None
        self._backward()
        self._gradients = [parameter.grad for parameter in self._parameters]
        recorder = self._recorder
        if recorder is None:
            recorder = GraphRecorder() if batch.x.is_cuda else NoRecorder()
        return recorder.record(self._work)

    def _lay_out(self, batch: MiniBatch) -> None:
        """Memory that every batch is copied to."""
        room, device = self._rooms, batch.x.device
        shape = (sum(room.nodes), *batch.x.shape[1:])
        self._x = torch.zeros(shape, dtype=batch.x.dtype, device=device)
        self._y = torch.empty(self._num_seeds, dtype=torch.int64, device=device)
        # Spread over the spare rows, which many threads add to at once.
        spare = torch.arange(sum(room.edges), device=device) % _SPARE_ROWS
        self._padding = (spare + self._num_seeds).expand(2, -1).contiguous()
        self._edges = self._padding.clone()

    def _fill(self, batch: MiniBatch) -> None:
        num, first = batch.num_seeds, self._rooms.nodes[0]
        self._x[:num].copy_(batch.x[:num])
        self._x[first : first + len(batch.x) - num].copy_(batch.x[num:])
        self._y[:num].copy_(batch.y)
        self._y[num:] = _IGNORED
        moved = torch.where(
            batch.edge_index >= num, batch.edge_index + (first - num), batch.edge_index
        )
        self._edges.copy_(self._padding)
        begin = place = 0
        for count, room in zip(batch.num_edges_per_hop, self._rooms.edges, strict=True):
            there = self._edges[:, place : place + count]
            there.copy_(moved[:, begin : begin + count])
            begin, place = begin + count, place + room

    @property
    def _rooms(self) -> Room:
        if self._room is None:
            raise ValueError("the step has no room before its first batch")
        return self._room

    def _scores(self) -> torch.Tensor:
        scores = _scores_of(
            self._network, self._x, self._edges, self._rooms.nodes, self._rooms.edges
        )
        return scores[: self._num_seeds]

    def _work(self) -> None:
        for gradient in self._gradients:
            if gradient is not None:
                gradient.zero_()
        self._backward()

    def _backward(self) -> None:
        loss = torch.nn.functional.cross_entropy(
            self._scores(), self._y, ignore_index=_IGNORED
        )
        loss.backward()
        self._loss = loss.detach()

    @torch.no_grad()
    def _check(self, batch: MiniBatch) -> None:
        """Padding must not reach the seeds."""
        modes = [(module, module.training) for module in self._network.modules()]
        self._network.eval()
        try:
            plain, padded = self._both(batch)
        finally:
            for module, training in modes:
                module.training = training
        size = float(plain.abs().max())
        # Other sizes may run by other kernels, which sum in another order. Rows that
        # meet the padding differ by far more.
        if not torch.allclose(plain, padded, rtol=1e-2, atol=1e-2 * size + 1e-6):
            worst = float((plain - padded).abs().max())
            raise ValueError(
                "capture: expects a model whose rows do not meet outside the edges, "
                f"got scores that differ by {worst:.3g} of {size:.3g} with padding: "
                "set capture=false"
            )

    def _both(self, batch: MiniBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores of the seeds, without padding and with it."""
        plain = _scores_of(
            self._network,
            batch.x,
            batch.edge_index,
            batch.num_nodes_per_hop,
            batch.num_edges_per_hop,
        )[: batch.num_seeds]
        return plain, self._scores()[: batch.num_seeds]


def _scores_of(
    network: torch.nn.Module,
    x: torch.Tensor,
    edges: torch.Tensor,
    nodes_per_hop: Sequence[int],
    edges_per_hop: Sequence[int],
) -> torch.Tensor:
    out: torch.Tensor = network(
        x,
        edges,
        num_sampled_nodes_per_hop=list(nodes_per_hop),
        num_sampled_edges_per_hop=list(edges_per_hop),
    )
    return out


def _with_slack(num: int) -> int:
    """Batches of as many seeds differ by a percent or two; in steps."""
    return -(-(num + num // 32 + 1) // _ROUND) * _ROUND
