"""Where the edges lie that neighbours are drawn from."""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pydirect.memory import device_alias, pin
from pydirect.sampling.graph import Graph

_BLOCK_EDGES_SHIFT = 14
MAX_PARTS = 16


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
    running: torch.Tensor | None
    """float64, shape (num_edges,): running sums of the weights."""

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
        weighted: prepare running sums of the weights: 8 bytes an edge, beside it.
        peers: the GPUs that share the edges, at most 16, for `Residence.PEERS`.

    Raises:
        ValueError: no weights, or one below 0 or not finite, or their sum is not;
            peers missing, too many or out of reach.
    """
    target = torch.device(device)
    where = Residence(residence)
    running = positive = None
    if weighted:
        running, positive = _running_sums(graph)
    parts: tuple[torch.Tensor, ...]
    if where is Residence.PEERS:
        parts = _spread(graph.neighbors, target, tuple(torch.device(p) for p in peers))
    elif where is Residence.HOST:
        parts = (_in_place(graph.neighbors, target),)
        running = None if running is None else _in_place(running, target)
    else:
        parts = (graph.neighbors.to(target),)
    if running is not None and where is not Residence.HOST:
        running = running.to(target)
    return ResidentGraph(
        device=target,
        num_nodes=graph.num_nodes,
        num_edges=graph.num_edges,
        offsets=graph.offsets.to(target),
        parts=parts,
        part_shift=_BLOCK_EDGES_SHIFT,
        running=running,
        positive=None if positive is None else positive.to(target),
        num_sources=graph.num_sources,
    )


def _running_sums(graph: Graph) -> tuple[torch.Tensor, torch.Tensor]:
    weights = graph.weights
    if weights is None:
        raise ValueError(
            "weights: weighted sampling expects a graph with weights, got one without"
        )
    values = weights.double()
    wrong = ~((values >= 0) & torch.isfinite(values))
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0])
        raise ValueError(
            "weights: weighted sampling expects finite weights of 0 or more, got "
            f"{weights[at].item()} at edge {at}"
        )
    running = values.cumsum(0)
    if len(running) and not math.isfinite(running[-1]):
        raise ValueError(
            "weights: weighted sampling expects weights whose sum is a float64, got "
            f"weights up to {values.max().item()}: scale them down"
        )
    # As the draws see it: what is lost in the sums has no weight.
    grows = torch.ones_like(running, dtype=torch.int64)
    grows[0:1] = (running[0:1] > 0).long()
    grows[1:] = (running[1:] > running[:-1]).long()
    counts = torch.zeros(len(running) + 1, dtype=torch.int64)
    torch.cumsum(grows, 0, out=counts[1:])
    return running, counts[graph.offsets[1:]] - counts[graph.offsets[:-1]]


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
