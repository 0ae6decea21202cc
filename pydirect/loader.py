"""Mini-batches on the device while the one before trains.

Three stages overlap, as in chapter 3 of S. W. Min's dissertation but inside one
process: threads sample, one thread fetches (features, edges, labels) on a side stream
into buffers that take turns, and the caller trains on its own stream. The device may
draw the neighbours itself (`Sampling`), on a stream of its own. The features are
fetched by a `Fetch`: `DirectFetch` lets the GPU gather from host memory, `StagedFetch`
is what PyG does (CPU gather, pin, copy).
"""

import enum
import queue
import threading
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, Protocol, TypeVar

import torch

from pydirect.budget import SmBudget
from pydirect.gather import index_select
from pydirect.memory import pin
from pydirect.sampling import (
    DeviceSampler,
    Graph,
    NeighborSampler,
    ResidentGraph,
    SampledBatch,
    settle,
)
from pydirect.sampling.graph import check_nodes

T = TypeVar("T")


class Sampling(enum.Enum):
    """Who draws neighbours."""

    THREADS = "threads"  # CPU threads
    DEVICE = "device"  # the training device, from a copy of the graph in its memory
    HOST = "host"  # the training device, from the graph in host memory
    PEERS = "peers"  # the training device, from blocks of edges over all GPUs


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """How batches are made."""

    batch_size: int = 1024
    """Seeds a batch."""

    fanouts: tuple[int, ...] = (15, 10, 5)
    """Neighbours a node, hop by hop."""

    sampling: Sampling | str = Sampling.THREADS
    """Who draws neighbours: "threads", "device", "host" or "peers"; see `Sampling`. The
    samples of the last three are the same; threads draw others."""

    num_samplers: int = 4
    """Sampling threads."""

    num_buffers: int = 2
    """Batches on the device at once; 1 turns overlap with training off."""

    max_sms: int | str | None = 16
    """Streaming multiprocessors that gathering may use. None: the gather decides;
    "auto": measured in the first gathers, then learnt from what training waits
    (`SmBudget`; `MiniBatchLoader.explain` tells). Sixteen fill the link next to
    training; where training takes longer than copying, fewer leave it more."""

    shuffle: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "sampling", Sampling(self.sampling))
        for name in ("batch_size", "num_samplers", "num_buffers"):
            value = getattr(self, name)
            if not isinstance(value, Integral) or value < 1:
                raise ValueError(
                    f"{name}: expects an integer of 1 or more, got {value}"
                )
        if not isinstance(self.seed, Integral):
            raise ValueError(f"seed: expects an integer, got {self.seed}")
        if not self.fanouts or any(
            not isinstance(k, Integral) or k == 0 or k < -1 for k in self.fanouts
        ):
            raise ValueError(
                "fanouts: expects one positive number (or -1) a hop, got "
                f"{self.fanouts}"
            )
        sms = self.max_sms
        if sms not in (None, "auto") and (isinstance(sms, str) or sms < 1):
            raise ValueError(f'max_sms: expects at least 1, "auto" or null, got {sms}')

    @property
    def fixed_sms(self) -> int | None:
        """``max_sms`` where it is a number."""
        return None if isinstance(self.max_sms, str) else self.max_sms


@dataclass(frozen=True, kw_only=True)
class MiniBatch:
    """One batch on the training device. The memory of ``x`` is reused once the next
    batch is asked for."""

    x: torch.Tensor
    """Features, shape (num_nodes, num_features)."""

    y: torch.Tensor
    """Labels of the seeds, shape (num_seeds,)."""

    edge_index: torch.Tensor
    """int64, shape (2, num_edges)."""

    num_seeds: int
    num_nodes_per_hop: tuple[int, ...]
    num_edges_per_hop: tuple[int, ...]
    weight: float = 1.0
    """Of this batch's mean loss in the mean over the processes of a run; 0 where there
    were fewer seeds left than processes: the batch counts for nothing."""

    @property
    def num_counted(self) -> int:
        """Seeds that are this process's own."""
        return self.num_seeds if self.weight else 0


class Fetch(Protocol):
    """Brings rows of a host table to the training device."""

    @property
    def uses_cpu(self) -> bool:
        """Whether CPU threads gather. Where they do not, the fetching thread runs alone
        and does not wait for cores on which samplers are at work."""
        ...

    max_sms: int | None
    """Multiprocessors of the next gather; see `LoaderConfig.max_sms`."""

    def rows(self, node_ids: torch.Tensor, slot: int) -> torch.Tensor:
        """``table[node_ids]`` on the device, on the current stream.

        Args:
            node_ids: int64, shape (num_nodes,), on the CPU or the device.
            slot: which of the buffers that take turns may be used.
        """
        ...


class StagedFetch:
    """PyG's way: the CPU gathers with all its threads, pins, and copies."""

    uses_cpu = True
    max_sms: int | None = None

    def __init__(self, table: torch.Tensor, device: torch.device) -> None:
        """``table``: CPU, shape (num_nodes, num_features)."""
        self._table = table
        self._device = device

    def rows(self, node_ids: torch.Tensor, slot: int) -> torch.Tensor:
        """See `Fetch.rows`. Every batch is a new tensor, as in PyG."""
        return _send(self._table.index_select(0, node_ids.cpu()), self._device)


class DirectFetch:
    """The GPU gathers from host memory, into buffers that take turns."""

    def __init__(
        self,
        table: torch.Tensor,
        device: torch.device,
        num_slots: int,
        max_sms: int | None = None,
    ) -> None:
        """``table``: contiguous CPU tensor, shape (num_nodes, num_features); pinned in
        place for a GPU, if it is not (`pydirect.memory.to_table` makes faster ones)."""
        self.uses_cpu = device.type != "cuda"
        self._table = table if self.uses_cpu else pin(table)
        self._device = device
        self.max_sms = max_sms
        self._buffers: list[torch.Tensor | None] = [None] * num_slots

    def rows(self, node_ids: torch.Tensor, slot: int) -> torch.Tensor:
        """See `Fetch.rows`."""
        return index_select(
            self._table,
            _send(node_ids, self._device),
            out=self._buffer(slot, len(node_ids)),
            max_sms=self.max_sms,
        )

    def _buffer(self, slot: int, num_rows: int) -> torch.Tensor:
        buffer = self._buffers[slot]
        if buffer is None or buffer.shape[0] < num_rows:
            # A tenth more than needed, so that the buffer grows a few times only.
            shape = (num_rows + num_rows // 10, *self._table.shape[1:])
            buffer = torch.empty(shape, dtype=self._table.dtype, device=self._device)
            self._buffers[slot] = buffer
        return buffer[:num_rows]


class BudgetedFetch:
    """A `Fetch` with the multiprocessors that an `SmBudget` gives."""

    def __init__(self, fetch: Fetch, budget: SmBudget) -> None:
        self.uses_cpu = fetch.uses_cpu
        self._fetch = fetch
        self._budget = budget
        self.max_sms: int | None = budget.gathering()

    def rows(self, node_ids: torch.Tensor, slot: int) -> torch.Tensor:
        """See `Fetch.rows`."""
        sms = self._budget.gathering()
        self.max_sms = self._fetch.max_sms = sms
        before = self._budget.waiting()
        rows = self._fetch.rows(node_ids, slot)
        self._budget.gathered(before, sms, len(node_ids))
        return rows


class MiniBatchLoader:
    """Iterates over the batches of an epoch; iterate again for the next epoch."""

    def __init__(
        self,
        graph: Graph | ResidentGraph,
        labels: torch.Tensor,
        seeds: torch.Tensor,
        fetch: Fetch,
        config: LoaderConfig,
        device: torch.device,
        *,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        """
        Args:
            graph: whose neighbourhoods are sampled; one that is settled already where
                several loaders draw on the device.
            labels: shape (num_nodes,), CPU.
            seeds: int64, shape (num_seeds,): the nodes to make batches of.
            fetch: how features reach ``device``.
            config: see `LoaderConfig`.
            device: where training runs.
            part: which of how many processes this is. ``batch_size`` is of each; their
                batches of one number are together a batch of one process, and all have
                as many.

        Raises:
            ValueError: ``seeds`` that are no nodes, ``part`` outside its number, or a
                settled graph for threads.
        """
        check_nodes("seeds", seeds, graph.num_nodes)
        self._graph = graph
        self._rank, self._num_ranks = part
        if not 0 <= self._rank < self._num_ranks:
            raise ValueError(
                f"part: expects 0 to {self._num_ranks - 1} of {self._num_ranks}, got "
                f"{self._rank}"
            )
        self._drawer = _drawer_of(graph, config, device)
        # Where the batches' node numbers come into being.
        where = torch.device("cpu") if self._drawer is None else device
        self._labels = labels.to(where)
        self._seeds = seeds.to(where)
        self._fetch: Fetch = fetch
        self._config = config
        self._device = device
        self._epoch = 0
        self._scratch = threading.local()
        self._num_threads = torch.get_num_threads()
        gpu = device.type == "cuda"
        self._side = _new_stream(device) if gpu else None
        self._budget: SmBudget | None = None
        if gpu and config.max_sms == "auto":
            self._budget = SmBudget(_new_timer)
            self._fetch = BudgetedFetch(fetch, self._budget)
        self.draw_stream = _new_stream(device) if gpu and self.draws else None
        """Where the device draws; see [Note: Three streams]."""

    def __len__(self) -> int:
        return -(-len(self._seeds) // (self._config.batch_size * self._num_ranks))

    @property
    def draws(self) -> bool:
        """Whether the device draws, not threads."""
        return self._drawer is not None

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration makes; it decides the order and samples."""
        return self._epoch

    @epoch.setter
    def epoch(self, value: int) -> None:
        self._epoch = value

    def sampled(self) -> Generator[SampledBatch, None, None]:
        """Yield the sampled batches of one epoch, in order, on the CPU; on the device
        where that draws."""
        plan = self._plan()
        if self._drawer is not None:
            yield from self._drawn(self._drawer, plan)
            return
        waiting: deque[Future[SampledBatch]] = deque()
        with ThreadPoolExecutor(self._config.num_samplers) as pool:
            try:
                for number, part in enumerate(plan):
                    waiting.append(pool.submit(self._sample, part, number))
                    if len(waiting) > 2 * self._config.num_samplers:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()
                self._epoch += 1
                torch.set_num_threads(self._num_threads)

    def _drawn(
        self, drawer: DeviceSampler, plan: "tuple[_Part, ...]"
    ) -> Generator[SampledBatch, None, None]:
        """Batches drawn on the device, on the stream of whoever asks for them."""
        epoch = self._config.seed * 1_000_003 + self._epoch
        try:
            for number, part in enumerate(plan):
                batch = drawer.sample(part.seeds, epoch, number)
                yield (
                    batch if part.weight == 1.0 else replace(batch, weight=part.weight)
                )
        finally:
            self._epoch += 1

    def hand_over(self, batch: MiniBatch, fetched: Any) -> None:
        """Order a batch that is fetched at ``fetched`` before the caller's stream."""
        budget = self._budget
        if budget is None:
            _hand_over(batch, fetched)
            return
        before = budget.waiting()
        _hand_over(batch, fetched)
        budget.waited(before)

    def explain(self) -> str:
        """Tell how many multiprocessors gathering takes, and what was measured."""
        if self._budget is not None:
            return str(self._budget)
        return f"max_sms {self._config.max_sms} (set)"

    def use_threads(self) -> None:
        """Let operators of the fetching thread use the threads there were before
        sampling, if it is CPU threads that gather.

        See `_sample`: a thread's setting is also the default of threads to come.
        """
        torch.set_num_threads(self._num_threads if self._fetch.uses_cpu else 1)

    def fetch(self, sampled: SampledBatch, slot: int = 0) -> MiniBatch:
        """Fetch one batch to the device, on the current stream."""
        seeds = sampled.node_ids[: sampled.num_seeds]
        return MiniBatch(
            x=self._fetch.rows(sampled.node_ids, slot),
            y=_send(self._labels[seeds], self._device),
            edge_index=_send(sampled.edge_index, self._device),
            num_seeds=sampled.num_seeds,
            num_nodes_per_hop=sampled.num_nodes_per_hop,
            num_edges_per_hop=sampled.num_edges_per_hop,
            weight=sampled.weight,
        )

    def __iter__(self) -> Iterator[MiniBatch]:
        """Batches in order; a batch's memory is reused once the next one is asked for.

        Leaving the loop early stops the threads.
        """
        if self._config.num_buffers == 1:
            for sampled in self.sampled():
                yield self.fetch(sampled)
            return
        pipeline = _Pipeline(self, self._config.num_buffers, self._side)
        try:
            yield from pipeline.batches()
        finally:
            pipeline.stop()

    def _plan(self) -> "tuple[_Part, ...]":
        seeds = self._seeds
        if self._config.shuffle:
            generator = torch.Generator()
            generator.manual_seed(_bits(self._config.seed * 1_000_003 + self._epoch))
            order = torch.randperm(len(seeds), generator=generator, device="cpu")
            seeds = seeds[order.to(seeds.device)]
        num = self._num_ranks
        return tuple(
            _part_of(together, self._rank, num)
            for together in torch.split(seeds, self._config.batch_size * num)
            if len(together)
        )

    def _sample(self, part: "_Part", number: int) -> SampledBatch:
        if not hasattr(self._scratch, "sampler"):
            # Threads are the parallelism here: one core each.
            torch.set_num_threads(1)
            if not isinstance(self._graph, Graph):
                raise ValueError("graph: threads expect a Graph, got a settled one")
            self._scratch.sampler = NeighborSampler(self._graph, self._config.fanouts)
        sampler: NeighborSampler = self._scratch.sampler
        epoch = self._config.seed * 1_000_003 + self._epoch
        number = number * self._num_ranks + self._rank
        batch = sampler.sample(part.seeds, _bits((epoch << 24) + number))
        batch = replace(batch, weight=part.weight)
        if self._device.type != "cuda":
            return batch
        # Here and not in the fetching thread, on whose time the GPU waits.
        return replace(
            batch,
            node_ids=batch.node_ids.pin_memory(),
            edge_index=batch.edge_index.pin_memory(),
        )


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A process's seeds of one batch."""

    seeds: torch.Tensor
    weight: float


def _bits(seed: int) -> int:
    """Return the 64 bits that a generator takes."""
    return seed & (1 << 64) - 1


def _part_of(together: torch.Tensor, rank: int, num_ranks: int) -> _Part:
    """Share ``together`` out evenly, so that weighted means add up to its mean."""
    seeds = together[rank::num_ranks]
    if len(seeds) == 0:
        # Gradients are averaged over all processes, so this one needs some.
        return _Part(seeds=together[:1], weight=0.0)
    return _Part(seeds=seeds, weight=len(seeds) * num_ranks / len(together))


@dataclass(frozen=True, kw_only=True)
class _Slot:
    """A buffer that is free once ``released`` has passed."""

    number: int
    released: Any


@dataclass(frozen=True, kw_only=True)
class _Drawn:
    """A sample that is there once ``drawn`` has passed; None: it is there."""

    batch: SampledBatch
    drawn: Any


@dataclass(frozen=True, kw_only=True)
class _Ready:
    batch: MiniBatch
    slot: int
    fetched: Any


def _handed_over(made: "queue.Queue[T | BaseException | None]") -> Iterator[T]:
    """Yield what another thread puts, up to None; raise what it failed with."""
    while (one := made.get()) is not None:
        if isinstance(one, BaseException):
            raise one
        yield one


class _DrawAhead:
    """A thread that draws on the device while another fetches.

    [Note: Three streams] Drawing waits for the device at every hop. On the fetching
    stream that wait would be for the gather of the batch before, and the stages would
    take turns. So the sample of the next batch, the gather of this one and the training
    on the one before have a stream each. The first two are short or narrow and go
    first: without priority each of the many small kernels of a sample would wait for
    blocks of the training's.
    """

    def __init__(self, loader: "MiniBatchLoader", ahead: int) -> None:
        """``ahead``: samples that may wait to be fetched."""
        self._loader = loader
        # One permit for each sample that may wait, and one to stop.
        self._wanted = threading.Semaphore(ahead)
        self._drawn: queue.Queue[_Drawn | BaseException | None] = queue.Queue()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="pydirect-draw")
        self._thread.start()

    def batches(self) -> Iterator[_Drawn]:
        """Samples in order."""
        for drawn in _handed_over(self._drawn):
            self._wanted.release()
            yield drawn

    def stop(self) -> None:
        """Stop the thread and wait for it."""
        self._stopping.set()
        self._wanted.release()
        self._thread.join()

    def _work(self) -> None:
        sampled = self._loader.sampled()
        stream = self._loader.draw_stream
        try:
            with torch.cuda.stream(stream) if stream else nullcontext():
                while self._wanted.acquire() and not self._stopping.is_set():
                    batch = next(sampled, None)
                    if batch is None:
                        break
                    event = stream.record_event() if stream else None
                    self._drawn.put(_Drawn(batch=batch, drawn=event))
        except BaseException as error:  # handed to the fetching thread
            self._drawn.put(error)
        finally:
            sampled.close()
            self._drawn.put(None)


class _Pipeline:
    """The threads of one epoch and their queues."""

    def __init__(
        self, loader: MiniBatchLoader, num_slots: int, side: Any | None
    ) -> None:
        self._loader = loader
        self._side = side
        self._free: queue.Queue[_Slot | None] = queue.Queue()
        self._ready: queue.Queue[_Ready | BaseException | None] = queue.Queue()
        self._stopping = threading.Event()
        for number in range(num_slots):
            self._free.put(_Slot(number=number, released=None))
        self._ahead = _DrawAhead(loader, num_slots) if loader.draws else None
        self._thread = threading.Thread(target=self._work, name="pydirect-fetch")
        self._thread.start()

    def batches(self) -> Iterator[MiniBatch]:
        """Batches as they get ready, ordered before the caller's stream."""
        for ready in _handed_over(self._ready):
            if ready.fetched is not None:
                self._loader.hand_over(ready.batch, ready.fetched)
            yield ready.batch
            released = None
            if self._side is not None:
                released = torch.cuda.current_stream().record_event()
            self._free.put(_Slot(number=ready.slot, released=released))

    def stop(self) -> None:
        """Stop the threads and wait for them; the queues are dropped."""
        self._stopping.set()
        self._free.put(None)
        if self._ahead is not None:
            self._ahead.stop()
        self._thread.join()

    def _work(self) -> None:
        on_side = torch.cuda.stream(self._side) if self._side else nullcontext()
        try:
            with on_side, closing(self._sampled()) as sampled:
                self._loader.use_threads()
                for drawn in sampled:
                    slot = self._free.get()
                    if slot is None or self._stopping.is_set():
                        return
                    self._ready.put(self._fetch(drawn, slot))
            self._ready.put(None)
        except BaseException as error:  # handed to the caller, who raises it
            self._ready.put(error)

    def _sampled(self) -> Generator[_Drawn, None, None]:
        if self._ahead is not None:
            yield from self._ahead.batches()
            return
        with closing(self._loader.sampled()) as sampled:
            for batch in sampled:
                yield _Drawn(batch=batch, drawn=None)

    def _fetch(self, drawn: _Drawn, slot: _Slot) -> _Ready:
        if self._side is None:
            batch = self._loader.fetch(drawn.batch, slot.number)
            return _Ready(batch=batch, slot=slot.number, fetched=None)
        if drawn.drawn is not None:
            self._side.wait_event(drawn.drawn)
            for tensor in (drawn.batch.node_ids, drawn.batch.edge_index):
                tensor.record_stream(self._side)
        if slot.released is not None:
            self._side.wait_event(slot.released)
        batch = self._loader.fetch(drawn.batch, slot.number)
        fetched = self._side.record_event()
        return _Ready(batch=batch, slot=slot.number, fetched=fetched)


def _drawer_of(
    graph: Graph | ResidentGraph, config: LoaderConfig, device: torch.device
) -> DeviceSampler | None:
    """None where threads sample."""
    if config.sampling is Sampling.THREADS:
        if isinstance(graph, ResidentGraph):
            raise ValueError(
                "sampling: expects device, host or peers for a settled graph, got "
                "threads"
            )
        return None
    if isinstance(graph, Graph):
        graph = settled_for(graph, device, Sampling(config.sampling))
    return DeviceSampler(graph, config.fanouts)


def settled_for(
    graph: Graph, device: torch.device, sampling: Sampling
) -> ResidentGraph:
    """Put a graph where ``device`` draws from it; ``peers``: over all GPUs."""
    peers: tuple[torch.device, ...] = ()
    if sampling is Sampling.PEERS:
        count = torch.cuda.device_count() if device.type == "cuda" else 0
        peers = tuple(torch.device("cuda", gpu) for gpu in range(count)) or (device,)
    return settle(graph, device, sampling.value, peers=peers)


def _new_timer() -> Any:
    return torch.cuda.Event(enable_timing=True)


def _new_stream(device: torch.device) -> Any:
    """Make a stream whose kernels go before those of training."""
    return torch.cuda.Stream(device, priority=-1)


def _hand_over(batch: MiniBatch, fetched: Any) -> None:
    """Order a batch made on the side stream before the caller's stream."""
    stream = torch.cuda.current_stream(batch.x.device)
    stream.wait_event(fetched)
    for tensor in (batch.x, batch.y, batch.edge_index):
        tensor.record_stream(stream)


def _send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """To the device through pinned memory, without waiting."""
    if device.type != "cuda" or tensor.device == device:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
