"""What zero-copy traversal is compared with: breadth-first search by copying.

Both use the product's own kernels on what they have copied, and are given every
advantage that is cheap to give: pages move at the speed of the link without the cost of
a page fault, and lists are compacted by all cores while the part before is copied.
"""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import torch

from pydirect.memory import empty_pinned
from pydirect.sampling import Graph
from pydirect.traversal import PlacedGraph, Walk
from pydirect.traversal.passes import visitor_of
from pydirect.traversal.placed import Frontier, HotBlocks
from pydirect.traversal.visits import Mark, seen_bits

PAGE_BYTES = 64 << 10


class PageCache:
    """A cache of pages in GPU memory, least recently used out: unified memory without
    the price of its faults."""

    name = "page cache"

    def __init__(self, placed: PlacedGraph, share: float = 0.25) -> None:
        """``share`` of the edge list that fits."""
        size = placed.edges.element_size()
        self._placed = placed
        self._shift = (PAGE_BYTES // size).bit_length() - 1
        page = 1 << self._shift
        if placed.shift:
            raise ValueError("PageCache expects an edge list that starts on a line")
        whole = placed.num_edges >> self._shift
        self._pages = placed.edges[: whole << self._shift].view(whole, page)
        self._num_pages = whole + 1  # the last one is partial and stays on the host
        self._capacity = max(1, int(whole * share))
        device = placed.device
        self._cache = torch.empty(
            (self._capacity, page), dtype=placed.edges.dtype, device=device
        )
        self._slots = torch.full(
            (self._num_pages,), -1, dtype=torch.int32, device=device
        )
        self._holds = torch.full((self._capacity,), -1, device=device)
        self._used = torch.zeros(self._capacity, dtype=torch.int64, device=device)
        self._tick = 0
        self.bytes_moved = 0

    def bfs(self, source: int) -> torch.Tensor:
        """Levels; see `pydirect.traversal.bfs`."""
        placed, visitor = self._placed, visitor_of(self._placed.device)
        level = torch.full(
            (placed.num_nodes,), -1, dtype=torch.int32, device=placed.device
        )
        level[source] = 0
        placed.hot = HotBlocks(
            edges=self._cache.view(-1),
            weights=None,
            slots=self._slots,
            block_shift=self._shift,
        )
        now = 0
        while True:
            nodes = ((level == now) & placed.has_edges).nonzero().squeeze(1)
            if len(nodes) == 0:
                placed.hot = None
                return level
            mark = Mark(level=level, seen=seen_bits(level), now=now)
            for part in self._batches(nodes):
                frontier = placed.frontier(part)
                visitor.visit(placed, frontier, mark)
            now += 1

    def _batches(self, nodes: torch.Tensor) -> "list[torch.Tensor]":
        """Parts of the frontier whose pages fit, with their pages brought in."""
        offsets = self._placed.offsets
        first = offsets[nodes] >> self._shift
        last = (offsets[nodes + 1] - 1) >> self._shift
        begin, num = 0, len(nodes)
        added = last - first + 1
        added[1:] -= (first[1:] <= last[:-1]).long()
        sums = added.cumsum(0)
        while begin < num:
            before = sums[begin - 1] if begin else sums.new_zeros(())
            bound = (before + self._capacity - 1).reshape(1)
            end = max(begin + 1, int(torch.searchsorted(sums, bound, right=True)))
            self._bring(first[begin:end], last[begin:end])
            yield nodes[begin:end]
            begin = end

    def _bring(self, first: torch.Tensor, last: torch.Tensor) -> None:
        marks = torch.zeros(self._num_pages + 1, dtype=torch.int64, device=first.device)
        ones = torch.ones_like(first)
        marks.index_add_(0, first, ones)
        marks.index_add_(0, last + 1, -ones)
        wanted = marks.cumsum(0)[:-1] > 0
        wanted[-1] = False  # the partial page
        self._tick += 1
        held = self._slots[wanted]
        self._used[held[held >= 0].long()] = self._tick
        missing = (wanted & (self._slots < 0)).nonzero().squeeze(1)[: self._capacity]
        if len(missing) == 0:
            return
        victims = self._used.argsort(stable=True)[: len(missing)]
        old = self._holds[victims]
        self._slots[old[old >= 0]] = -1
        self._cache[victims] = self._pages.index_select(0, missing)
        self._slots[missing] = victims.int()
        self._holds[victims] = missing
        self._used[victims] = self._tick
        self.bytes_moved += len(missing) * PAGE_BYTES


class Subgraphs:
    """Subway's way (EuroSys 2020): the CPU gathers the frontier's lists, the copy
    engine moves them, the GPU works on the copy. Two buffers take turns."""

    name = "subgraph copy"

    def __init__(
        self,
        graph: Graph,
        directory: Path,
        device: torch.device,
        *,
        buffer_bytes: int = 256 << 20,
    ) -> None:
        """``directory``: where to compile the gathering code. On a CPU ``device`` the
        copies are plain ones: for tests."""
        compiler = shutil.which("g++")
        if compiler is None:
            raise RuntimeError(
                "Subgraphs needs g++, which gathers lists with all cores"
            )
        built = directory / "compact.so"
        source = Path(__file__).with_name("compact.cpp")
        flags = ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
        subprocess.run([compiler, *flags, str(source), "-o", str(built)], check=True)
        self._library = ctypes.CDLL(str(built))
        self._graph = graph
        self._device = device
        self._offsets = graph.offsets.to(self._device)
        self._has_edges = self._offsets.diff() > 0
        num = buffer_bytes // graph.neighbors.element_size()
        dtype = graph.neighbors.dtype
        self._host = [empty_pinned((num,), dtype) for _ in range(2)]
        self._gpu = [
            torch.empty(num, dtype=dtype, device=self._device) for _ in range(2)
        ]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._lists = [empty_pinned((graph.num_nodes,), torch.int64) for _ in range(2)]
        self._threads = len(os.sched_getaffinity(0))
        self.bytes_moved = 0

    def bfs(self, source: int) -> torch.Tensor:
        """Levels; see `pydirect.traversal.bfs`."""
        level = torch.full(
            (self._graph.num_nodes,), -1, dtype=torch.int32, device=self._device
        )
        level[source] = 0
        now = 0
        while True:
            nodes = ((level == now) & self._has_edges).nonzero().squeeze(1)
            if len(nodes) == 0:
                return level
            begin = self._offsets[nodes]
            sums = (self._offsets[nodes + 1] - begin).cumsum(0)
            lists = [host[: len(nodes)] for host in self._lists]
            for host, device in zip(lists, (begin, sums), strict=True):
                host.copy_(device)
            self._level(*lists, Mark(level=level, seen=seen_bits(level), now=now))
            now += 1

    def _level(self, begin: torch.Tensor, sums: torch.Tensor, mark: Mark) -> None:
        room, first, turn = len(self._host[0]), 0, 0
        size = self._graph.neighbors.element_size()
        while first < len(begin):
            before = int(sums[first - 1]) if first else 0
            last = int(torch.searchsorted(sums, before + room, right=True))
            if last == first:
                raise RuntimeError(f"a list of more than {room} edges: larger buffers")
            waiting = self._copied[turn]
            if waiting is not None:
                waiting.synchronize()
            self._library.compact(
                ctypes.c_void_p(self._graph.neighbors.data_ptr()),
                ctypes.c_void_p(begin.data_ptr()),
                ctypes.c_void_p(sums.data_ptr()),
                ctypes.c_longlong(first),
                ctypes.c_longlong(last),
                ctypes.c_longlong(size),
                ctypes.c_void_p(self._host[turn].data_ptr()),
                ctypes.c_int(self._threads),
            )
            num = int(sums[last - 1]) - before
            self._gpu[turn][:num].copy_(self._host[turn][:num], non_blocking=True)
            if self._device.type == "cuda":
                self._copied[turn] = torch.cuda.current_stream().record_event()
            copied = _Copied(self._gpu[turn][:num])
            visitor_of(self._device).visit(copied, copied.all_edges(), mark)
            self.bytes_moved += num * size
            first, turn = last, 1 - turn


class _Copied(PlacedGraph):
    """Edges in GPU memory as one list: whoever marks does not ask whose they are."""

    def __init__(self, edges: torch.Tensor) -> None:
        self.device = edges.device
        self.walk = Walk.LINES
        self.edges = edges
        self.weights = None
        self.graph = None  # type: ignore[assignment]
        self.blocks = None  # plain lists
        self.hot = None
        self.shift = 0
        self.offsets = torch.tensor([0, len(edges)], device=edges.device)

    def all_edges(self) -> Frontier:
        """The list, whole."""
        unit = self.unit_shift(weighted=False)
        units = (len(self.edges) + (1 << unit) - 1) >> unit
        return Frontier(
            nodes=torch.zeros(1, dtype=torch.int64, device=self.device),
            sums=torch.tensor([units], device=self.device),
            num_nodes=1,
            num_edges=len(self.edges),
            num_units=units,
            limit=len(self.edges),
        )
