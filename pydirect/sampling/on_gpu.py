"""Launch the kernels of sample.cu."""

import ctypes
import functools
from pathlib import Path

import torch

from pydirect.kernels.launch import KernelModule, members
from pydirect.kernels.nvrtc import load_cubin
from pydirect.sampling.hop import Draw, Hop, Numbering, counts_of, nothing
from pydirect.sampling.resident import MAX_PARTS, ResidentGraph

_THREADS = 256
_MAX_BLOCKS = 4096


class SampleArgs(ctypes.Structure):
    """Mirrors the struct of the same name in sample.cu."""

    _fields_ = (
        ("parts", ctypes.c_void_p * MAX_PARTS),
        *members(
            ctypes.c_void_p,
            "weights running positive offsets nodes starts edge target neighbor slot "
            "rank added source",
        ),
        *members(ctypes.c_int64, "num_nodes room base"),
        ("key", ctypes.c_uint64),
        ("relation", ctypes.c_uint32),
        *members(ctypes.c_int, "part_shift num_parts patience"),
    )


class GpuHopper:
    """Takes hops with kernels; one wait for the device a hop."""

    def __init__(self, module: KernelModule) -> None:
        """``module``: sample.cu, compiled."""
        self._module = module

    def hop(
        self, graph: ResidentGraph, nodes: torch.Tensor, draw: Draw, known: Numbering
    ) -> Hop:
        """See `Hopper.hop`."""
        if len(nodes) == 0 or draw.fanout == 0:
            return nothing(graph.device)
        if graph.device.type != "cuda":  # sample.cu built for the host, in tests
            return self._hop(graph, nodes, draw, known, 0)
        with torch.cuda.device(graph.device):
            stream = torch.cuda.current_stream().cuda_stream
            return self._hop(graph, nodes, draw, known, stream)

    def _hop(
        self,
        graph: ResidentGraph,
        nodes: torch.Tensor,
        draw: Draw,
        known: Numbering,
        stream: int,
    ) -> Hop:
        num, device = len(nodes), graph.device
        starts = torch.zeros(num + 1, dtype=torch.int64, device=device)
        degree = graph.offsets[nodes + 1] - graph.offsets[nodes]
        torch.cumsum(counts_of(graph, nodes, draw, degree), 0, out=starts[1:])
        room = int(starts[-1]) if draw.fanout < 0 else num * draw.fanout
        if room >= 1 << 31:
            raise ValueError(
                f"fanouts: expects fewer than 2**31 edges a hop, got {room}: use a "
                "smaller batch"
            )
        if room == 0:
            return nothing(device)
        edge, target, neighbor, source, added = torch.empty(
            (5, room), dtype=torch.int64, device=device
        )
        rank = torch.empty(room, dtype=torch.int32, device=device)
        arguments = self._arguments(graph, draw)
        arguments.nodes, arguments.starts = nodes.data_ptr(), starts.data_ptr()
        arguments.edge, arguments.target = edge.data_ptr(), target.data_ptr()
        arguments.neighbor, arguments.source = neighbor.data_ptr(), source.data_ptr()
        arguments.added, arguments.rank = added.data_ptr(), rank.data_ptr()
        arguments.slot, arguments.base = known.slot.data_ptr(), known.count
        arguments.num_nodes, arguments.room = num, room
        ids = "i32" if graph.parts[0].dtype == torch.int32 else "i64"
        self._launch(_pick_of(draw), arguments, num, stream)
        self._launch(f"read_{ids}", arguments, room, stream)
        self._launch("mark_new", arguments, room, stream)
        torch.cumsum(rank, 0, dtype=torch.int32, out=rank)
        self._launch("number_new", arguments, room, stream)
        self._launch("find_sources", arguments, room, stream)
        num_drawn, num_added = torch.stack([starts[-1], rank[-1].long()]).tolist()
        return Hop(
            edge=edge[:num_drawn],
            source=source[:num_drawn],
            target=target[:num_drawn],
            added=added[:num_added],
        )

    def _arguments(self, graph: ResidentGraph, draw: Draw) -> SampleArgs:
        arguments = SampleArgs(
            offsets=graph.offsets.data_ptr(),
            key=draw.key,
            relation=draw.relation,
            part_shift=graph.part_shift,
            num_parts=len(graph.parts),
            patience=draw.patience,
        )
        for i, part in enumerate(graph.parts):
            arguments.parts[i] = part.data_ptr()
        if draw.weighted:
            if graph.weights is None or graph.running is None or graph.positive is None:
                raise ValueError(
                    "weighted: expects a graph settled with weighted=True, got one "
                    "without"
                )
            arguments.weights = graph.weights.data_ptr()
            arguments.running = graph.running.data_ptr()
            arguments.positive = graph.positive.data_ptr()
        return arguments

    def _launch(
        self, name: str, arguments: SampleArgs, items: int, stream: int
    ) -> None:
        blocks = max(1, min(_MAX_BLOCKS, -(-items // _THREADS)))
        self._module.kernel(name).launch(
            grid=blocks, block=_THREADS, arguments=arguments, stream=stream
        )


def _pick_of(draw: Draw) -> str:
    """The kernel that draws."""
    if draw.fanout < 0:
        return "pick_all"
    chances = "weighted" if draw.weighted else "uniform"
    return f"pick_{chances}_{'replace' if draw.replace else 'distinct'}"


@functools.cache
def hopper_on(device: torch.device) -> GpuHopper:
    """The hopper of a GPU, with kernels compiled for it."""
    return GpuHopper(load_cubin(Path(__file__).with_name("sample.cu"), device))
