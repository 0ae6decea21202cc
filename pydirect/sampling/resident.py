"""Where the edges lie that neighbours are drawn from.

[Note: Sums of one list] A weighted draw looks for a number in the running sums of its
node's own list. Sums over the whole edge list would lose every weight that is small
next to the sum of other nodes' weights. Inside a list a weight may still be lost in
rounding: so which edges have a weight, and what is left when the heavy ones are drawn,
is read from the weights themselves. Each list is scaled by a power of two to weights
up to 1: no sum is too large, and ordinary weights keep all their bits. Test:
tests/pydirect/sampling/test_weights.py.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pydirect.memory import device_alias, pin
from pydirect.sampling.graph import Graph

_BLOCK_EDGES_SHIFT = 14
MAX_PARTS = 16
# Elements of padded lists.
_AT_ONCE = 1 << 22


class Residence(enum.Enum):
    """Who holds the edge list; offsets are always on the sampling device."""

    DEVICE = "device"  # copied into the memory of the sampling device
    HOST = "host"  # stays in host memory, read in place over the link
    PEERS = "peers"  # copied in blocks that take turns over several GPUs


@dataclass(frozen=True, kw_only=True)
class ResidentGraph:
    """A `Graph` that a device draws from; made by `settle`."""

    device: torch.device
    num_nodes: int
    num_edges: int
    offsets: torch.Tensor
    """int64, shape (num_nodes + 1,), on ``device``."""

    parts: tuple[torch.Tensor, ...]
    """The edges: one part, or blocks of ``2**part_shift`` that take turns."""

    part_shift: int
    weights: torch.Tensor | None
    """float64, shape (num_edges,): scaled list by list, 0 to 1."""

    running: torch.Tensor | None
    """float64, shape (num_edges,): running sums of ``weights``, anew in each list. See
    [Note: Sums of one list]."""

    positive: torch.Tensor | None
    """int64, shape (num_nodes,): edges with a weight above 0."""

    num_sources: int | None = None
    """As in `Graph`."""

    def neighbors_at(self, edge: torch.Tensor) -> torch.Tensor:
        """Read the neighbours of edges (int64), where ``device`` is a CPU: int64."""
        if len(self.parts) == 1:
            return self.parts[0][edge].long()
        block, inside = edge >> self.part_shift, edge & (1 << self.part_shift) - 1
        num = len(self.parts)
        place = (block // num << self.part_shift) + inside
        found = torch.empty_like(edge)
        for i, part in enumerate(self.parts):
            here = block % num == i
            found[here] = part[place[here]].long()
        return found


def settle(
    graph: Graph,
    device: torch.device | str,
    residence: Residence | str = Residence.DEVICE,
    *,
    weighted: bool = False,
    peers: Sequence[torch.device | str] = (),
) -> ResidentGraph:
    """Put a graph where a device draws from it.

    Args:
        graph: lists of sources; with weights if ``weighted``.
        device: that samples: a GPU, or the CPU.
        residence: of the edges.
        weighted: prepare weights and their running sums: 16 more bytes an edge.
        peers: the GPUs that share the edges, at most 16, for `Residence.PEERS`.

    Raises:
        ValueError: no weights, or one below 0 or not finite; peers missing, too many
            or out of reach.
    """
    target = torch.device(device)
    where = Residence(residence)
    weights = running = positive = None
    if weighted:
        weights = _scaled_weights(graph)
        running = _running_sums(weights, graph.offsets)
        positive = _counts(weights > 0, graph.offsets)
    parts: tuple[torch.Tensor, ...]
    if where is Residence.PEERS:
        parts = _spread(graph.neighbors, target, tuple(torch.device(p) for p in peers))
    elif where is Residence.HOST:
        parts = (_in_place(graph.neighbors, target),)
    else:
        parts = (graph.neighbors.to(target),)
    if weights is not None and running is not None:
        in_place = where is Residence.HOST
        weights, running = (
            _in_place(t, target) if in_place else t.to(target)
            for t in (weights, running)
        )
    return ResidentGraph(
        device=target,
        num_nodes=graph.num_nodes,
        num_edges=graph.num_edges,
        offsets=graph.offsets.to(target),
        parts=parts,
        part_shift=_BLOCK_EDGES_SHIFT,
        weights=weights,
        running=running,
        positive=None if positive is None else positive.to(target),
        num_sources=graph.num_sources,
    )


def _scaled_weights(graph: Graph) -> torch.Tensor:
    """See [Note: Sums of one list]: float64, shape (num_edges,)."""
    if graph.weights is None:
        raise ValueError(
            "weights: weighted sampling expects a graph with weights, got one without"
        )
    values = graph.weights.double()
    wrong = ~((values >= 0) & torch.isfinite(values))
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0])
        raise ValueError(
            "weights: weighted sampling expects finite weights of 0 or more, got "
            f"{graph.weights[at].item()} at edge {at}"
        )
    owner = torch.repeat_interleave(graph.degrees(), output_size=graph.num_edges)
    largest = torch.zeros(graph.num_nodes, dtype=torch.float64, device="cpu")
    largest.scatter_reduce_(0, owner, values, "amax")
    # numpy's are exact, also where the power of two itself is no float64.
    exponent = np.frexp(largest.numpy())[1][owner.numpy()]
    scaled = torch.from_numpy(np.ldexp(values.numpy(), -exponent))
    smallest = torch.finfo(torch.float64).tiny
    return torch.where(values > 0, scaled.clamp(min=smallest), 0.0)


def _counts(marked: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Count the marked edges of each list: int64, shape (num_nodes,)."""
    sums = torch.zeros(len(marked) + 1, dtype=torch.int64, device="cpu")
    torch.cumsum(marked, 0, out=sums[1:])
    return sums[offsets[1:]] - sums[offsets[:-1]]


def _running_sums(weights: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Add up each list from its first edge, one after the other."""
    running = torch.empty_like(weights)
    degrees = offsets.diff()
    width = 1
    while len(degrees) and width < 2 * int(degrees.max()):
        # Lists of similar lengths, padded to one width.
        nodes = ((degrees > width // 2) & (degrees <= width)).nonzero().squeeze(1)
        for some in nodes.split(max(1, _AT_ONCE // width)):
            rank = torch.arange(width, device="cpu")
            edge = offsets[some][:, None] + rank
            inside = rank < degrees[some][:, None]
            rows = torch.where(inside, weights[edge.clamp(max=len(weights) - 1)], 0.0)
            running[edge[inside]] = rows.cumsum(1)[inside]
        width *= 2
    return running


def _in_place(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return device_alias(pin(tensor) if device.type == "cuda" else tensor, device)


def _spread(
    edges: torch.Tensor, device: torch.device, peers: tuple[torch.device, ...]
) -> tuple[torch.Tensor, ...]:
    if not 1 <= len(peers) <= MAX_PARTS:
        raise ValueError(
            f"peers: expects 1 to {MAX_PARTS} devices that share the edges, got "
            f"{len(peers)}"
        )
    for peer in peers:
        if peer != device and not _reaches(device, peer):
            raise ValueError(
                f"peers: {device} cannot read the memory of {peer}: choose GPUs with "
                "peer access, or residence host"
            )
    block, num = 1 << _BLOCK_EDGES_SHIFT, len(peers)
    room = -(-len(edges) // block) * block
    padded = edges if room == len(edges) else _padded(edges, room)
    blocks = padded.view(-1, block)
    if num == 1:
        return (edges.to(peers[0]),)
    parts = tuple(blocks[i::num].to(peer).flatten() for i, peer in enumerate(peers))
    for peer in peers:
        if peer != device and device.type == "cuda":
            # The first copy between two GPUs opens the way for kernels as well.
            torch.empty(1, device=device).copy_(torch.empty(1, device=peer))
    return parts


def _padded(edges: torch.Tensor, room: int) -> torch.Tensor:
    wide = edges.new_zeros(room)
    wide[: len(edges)] = edges
    return wide


def _reaches(device: torch.device, peer: torch.device) -> bool:
    if device.type != "cuda" or peer.type != "cuda":
        return device.type == peer.type
    reaches: bool = torch.cuda.can_device_access_peer(device, peer)
    return reaches
