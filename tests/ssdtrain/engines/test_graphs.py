"""CUDA graphs: captured forwards and backwards, on a device that stands in for one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ssdtrain
from ssdtrain import api
from ssdtrain.cache.captured import MEMORY
from ssdtrain.errors import CaptureError
from ssdtrain.observe.planner import Planner
from ssdtrain.plan.plan import Plan
from ssdtrain.plan.profile import Profile
from ssdtrain.transfer.device import CpuDevice, CpuEvent, GraphEvent
from ssdtrain.transfer.graphs import GraphCopies
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.cache.plans import all_moved
from tests.ssdtrain.engines.blocks import Block
from tests.ssdtrain.targets import STAGED, settings_of

WIDTH, ROWS = 32, 64
SETTINGS: dict[str, Any] = {"max_overhead": 0.01, "target": "host", "min_bytes": 1}


class StrictEvent(CpuEvent):
    """Of a capture: nothing may be asked of it. Of before: not during a capture."""

    def __init__(self, inner: CpuEvent, device: "GraphDevice") -> None:
        super().__init__(done=True)
        self.inner = inner
        self.device = device
        self.capture = device.capture

    def query(self) -> bool:
        if self.capture or (self.device.capture and not self.device.is_relaxed):
            raise RuntimeError("operation not permitted when stream is capturing")
        return self.inner.query()

    def synchronize(self) -> None:
        if self.capture or self.device.capture:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.inner.synchronize()


class GraphDevice(CpuDevice):
    """A CPU whose calls can be "captured", with the rules that CUDA has for that."""

    def __init__(self) -> None:
        super().__init__()
        self.capture = 0
        """Number of the capture under way; 0: none."""
        self.num_captures = 0
        self.is_relaxed = False
        self.forked: dict[bool, StrictEvent] = {}
        """The last copy of a direction in this capture, until compute is behind it."""
        self.edges: list[tuple[int, str]] = []
        """Of captures: bytes of the copy, and what is behind it or that it is behind:
        "compute", "after" (of compute), "copy out"."""
        self.copies: list[tuple[bool, int, int]] = []
        """Direction, address on the host, bytes: of captured copies."""

    def is_capturing(self) -> bool:
        return self.capture > 0

    def now(self) -> CpuEvent:
        return StrictEvent(super().now(), self)

    def wait(self, event: Any, order: object = None, *, outwards: bool = False) -> None:
        if type(event) is GraphEvent:
            if event.is_behind(order):
                return
            event.passes(order)
            self.edges.append((event.event.num_bytes, "after"))
            assert event.event.capture == self.capture, "an event of another capture"
            event.event.inner.synchronize()
            if self.forked.get(event.event.outwards) is event.event:
                del self.forked[event.event.outwards]
            return
        if not self.capture:
            super().wait(event, order, outwards=outwards)

    def _copy(
        self, outwards: bool, source: Tensor, target: Tensor, after: Sequence[Any]
    ) -> CpuEvent:
        for event in after:
            assert event.capture == self.capture or not self.capture
            what = "copy out" if hasattr(event, "outwards") else "compute"
            self.edges.append((source.nbytes, what))
        inner = super()._copy(outwards, source, target, [])
        inner.synchronize()
        found = StrictEvent(inner, self)
        found.outwards, found.num_bytes = outwards, source.nbytes
        if self.capture:
            self.forked[outwards] = found
            host = target if outwards else source
            self.copies.append((outwards, host.data_ptr(), host.nbytes))
        return found

    @contextmanager
    def graph(self) -> Iterator[None]:
        self.num_captures += 1
        self.capture = self.num_captures
        yield
        kind: Any = torch.cuda.CUDAGraph
        kind.capture_end(None)
        self.capture = 0
        assert not self.forked, "a copy stream was not joined"


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> GraphDevice:
    found = GraphDevice()
    monkeypatch.setattr(api, "open_device", lambda _: found)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", lambda graph: None)

    @contextmanager
    def relaxed() -> Iterator[None]:
        found.is_relaxed = True
        yield
        found.is_relaxed = False

    monkeypatch.setattr("ssdtrain.cache.captured.relaxed_capture", relaxed)
    return found


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(WIDTH) for _ in range(3)))


def step(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    loss = model(x).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return same_bits(ours, theirs)


@pytest.mark.parametrize("recompute", ["auto", "off"])
@pytest.mark.parametrize("plan", ["offload-all", "auto"])
def test_a_captured_step_moves_and_rebuilds(
    device: GraphDevice, plan: str, recompute: str
) -> None:
    theirs, model = step(made()), made()
    settings = {**SETTINGS, "plan": plan, "recompute": recompute}
    if plan == "offload-all":
        settings["window_bytes"] = 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with ssdtrain.offload(model, **settings) as session:
        for _ in range(4):
            assert same(step(model), theirs)
            optimizer.step()
        if plan == "auto":
            session.follow(all_moved(session))
            assert same(step(model), theirs)
            optimizer.step()
        num_steps = len(session.steps)
        with device.graph():
            assert same(step(model), theirs)
        num_out = sum(outwards for outwards, _, _ in device.copies)
        assert num_out > (2 if recompute == "auto" else 6)
        places = [place[1:] for place in device.copies if place[0]]
        assert len(set(places)) == len(places), "two tensors share a place"
        assert {place[1:] for place in device.copies if not place[0]} <= set(places)
        assert session.graph_bytes >= sum(size for _, size in places)
        assert len(getattr(model, MEMORY)) == 1
        # Eager steps go on, beside the graph's memory, and no step was counted.
        assert same(step(model), theirs)
        optimizer.step()
        assert len(session.steps) == num_steps + 1
        used = {start for start, _ in places}
        again = len(device.copies)
        with device.graph():
            assert same(step(model), theirs)
        assert used.isdisjoint(start for _, start, _ in device.copies[again:])
    assert getattr(model, MEMORY), "the graphs may outlive the session"


def test_a_graph_holds_a_plan_of_its_own(
    device: GraphDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no host to wait for, and no region runs again in it: what pays in the
    eager step may not pay there. The eager steps keep theirs."""
    theirs, model = step(made()), made()
    asked: list[Profile] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with ssdtrain.offload(model, **SETTINGS, plan="auto") as session:
        for _ in range(4):
            assert same(step(model), theirs)
            optimizer.step()
        eager, moves = session.plan, all_moved(session)
        reports = len(session.steps)

        def choose(profile: Profile, *whatever: Any) -> Plan:
            asked.append(profile)
            return moves

        monkeypatch.setattr("ssdtrain.observe.planner.choose", choose)
        for _ in range(2):
            before = len(device.copies)
            with device.graph():
                assert same(step(model), theirs)
            assert len(device.copies) - before > 2 * len(model)
            assert not session.cache.cursor.num_strayed
        assert session.plan is eager and len(session.steps) == reports
        assert session.graph_plan is moves
        before = len(device.copies)
        assert same(step(model), theirs)
        assert len(device.copies) == before
    (profile,) = asked
    assert profile.host_ms == 0.0 and profile.tail_ms == 0.0


def test_a_graph_begins_with_one_segment(
    device: GraphDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For all forwards of a capture, once; eager steps take none."""
    asked: list[int] = []
    monkeypatch.setattr(
        "ssdtrain.cache.captured.begin_with", lambda size, where: asked.append(size)
    )
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with ssdtrain.offload(model, **SETTINGS, plan="auto") as session:
        for _ in range(4):
            step(model)
            optimizer.step()
        moves = all_moved(session)
        predicted = replace(session.plan.prediction, passing_peak_bytes=12345)
        moves = replace(moves, prediction=predicted)
        monkeypatch.setattr("ssdtrain.observe.planner.choose", lambda *_: moves)
        for number in range(1, 3):
            with device.graph():
                step(model)
                step(model)
            assert asked == [12345] * number
        step(model)
        assert len(asked) == 2


def test_no_step_counts_what_is_captured(device: GraphDevice) -> None:
    """The step before a capture is closed by the next forward that runs."""
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    settings = {**SETTINGS, "plan": "offload-all", "window_bytes": 60_000}
    with ssdtrain.offload(model, **settings) as session:
        for num_captures in (0, 0, 1, 2):
            step(model)
            optimizer.step()
            for _ in range(num_captures):
                with device.graph():
                    step(model)
        step(model)
        optimizer.step()
        counts = [
            (
                report.num_records,
                report.bytes_saved,
                report.bytes_kept,
                report.bytes_offloaded,
                report.bytes_recomputed,
                report.bytes_reloaded + report.bytes_forwarded,
                report.recipes,
            )
            for report in session.steps
        ]
    _, *counts = counts  # the first step knows no sizes yet
    assert len(counts) == 4 and min(counts[0][:-1]) > 0
    assert all(each == counts[0] for each in counts), counts


def test_forward_and_backward_in_graphs_of_their_own(device: GraphDevice) -> None:
    """As `make_graphed_callables` captures: no event crosses from one to the other."""
    theirs, model = step(made()), made()
    settings = {**SETTINGS, "plan": "offload-all", "window_bytes": 1}
    with ssdtrain.offload(model, **settings, recompute="off"):
        assert same(step(model), theirs)
        model.zero_grad()
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
        with device.graph():
            loss = model(x).square().mean()
        with device.graph():
            loss.backward()
        ours = [loss.detach(), *(p.grad for p in model.parameters())]
        assert same(ours, theirs)
        assert {outwards for outwards, _, _ in device.copies} == {True, False}


def test_copies_out_last_into_backward(device: GraphDevice) -> None:
    """Compute is not behind all of them where a forward ends: no capture ends there."""
    theirs, model = step(made()), made()
    settings = {**SETTINGS, "plan": "offload-all", "window_bytes": 50_000}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with ssdtrain.offload(model, **settings, recompute="off"):
        for _ in range(2):
            assert same(step(model), theirs)
            optimizer.step()
        model.zero_grad()
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
        with device.graph():
            loss = model(x).square().mean()
            assert True in device.forked
            loss.backward()
        assert same([loss.detach(), *(p.grad for p in model.parameters())], theirs)
        with device.graph():
            model(x).sum()
            assert True in device.forked  # joined by the capture's end alone


def test_sessions_share_the_end_of_a_capture(
    device: GraphDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last session that closes leaves torch as it was."""
    kind: Any = torch.cuda.CUDAGraph
    ended: list[int] = []

    def capture_end(graph: int) -> int:
        ended.append(graph)
        return -graph

    monkeypatch.setattr(kind, "capture_end", capture_end)
    first = ssdtrain.offload(made(), **SETTINGS)
    ours = kind.capture_end
    second = ssdtrain.offload(made(), **SETTINGS)
    assert kind.capture_end is ours is not capture_end
    first.close()
    assert kind.capture_end(1) == -1
    second.close()
    assert kind.capture_end is capture_end and ended == [1]


ALL_LEAVE = {**SETTINGS, "plan": "offload-all", "window_bytes": 1}


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        *(
            ({"max_overhead": 0.01, **ALL_LEAVE, "target": each}, "target='host'")
            for each in STAGED
        ),
        ({**ALL_LEAVE, "verify": "shadow"}, "verify='off'"),
        ({"max_overhead": 0.01, **SETTINGS, "plan": "auto"}, "can_capture"),
    ],
)
def test_what_a_graph_cannot_hold_is_refused(
    device: GraphDevice, tmp_path: Any, settings: dict[str, Any], text: str
) -> None:
    model = made()
    settings = {**settings, **settings_of(settings["target"], tmp_path)}
    with ssdtrain.offload(model, **settings) as session:
        with device.graph(), pytest.raises(CaptureError, match=text):
            step(model)
        step(model)  # nothing was lost
        assert session.last_step is not None


def test_an_eager_forward_in_flight_is_refused(device: GraphDevice) -> None:
    model = made()
    settings = {**SETTINGS, "plan": "offload-all", "window_bytes": 1}
    with ssdtrain.offload(model, **settings):
        loss = model(torch.randn(ROWS, WIDTH)).sum()
        with device.graph(), pytest.raises(CaptureError, match="eager forward"):
            step(model)
        loss.backward()


def test_memory_that_is_full_keeps_the_rest(device: GraphDevice) -> None:
    theirs, model = step(made()), made()
    settings = {**SETTINGS, "plan": "offload-all", "window_bytes": 1}
    with ssdtrain.offload(model, **settings, host_bytes=40_000) as session:
        with device.graph():
            assert same(step(model), theirs)
        assert 0 < session.graph_bytes <= 40_000


def bytes_of(*sizes: int) -> list[Tensor]:
    return [torch.zeros(size, dtype=torch.uint8) for size in sizes]


def test_one_edge_for_what_compute_waits_for_in_order(device: GraphDevice) -> None:
    """Whoever is behind a copy is behind those before it, and copies in that start
    together have one edge from compute and one back."""
    copies = GraphCopies(device, 1 << 20)
    with device.graph():
        transfers = [copies.store(each, "x") for each in bytes_of(1, 2, 3, 4)]
        first, *others, last = [each for each in transfers if each is not None]
        device.wait(others[1].copied)
        for transfer in (first, *others):
            device.wait(transfer.copied)
        assert device.edges[4:] == [(3, "after")]
        device.wait(first.copied, "another order")
        assert device.edges[5:] == [(1, "after")]
        loads = copies.load([first, last], bytes_of(1, 4))
        assert device.edges[6:] == [(1, "compute"), (4, "copy out")]
        for load in loads:
            load.wait(device)
        assert device.edges[8:] == [(4, "after")]
        copies.load(others, bytes_of(2, 3))
        assert device.edges[9:] == [(2, "compute")]
        copies.join()
    # Nothing of this capture holds in the next.
    del device.edges[:]
    with device.graph():
        transfer = copies.store(bytes_of(5)[0], "x")
        assert transfer is not None
        device.wait(transfer.copied)
    assert device.edges == [(5, "compute"), (5, "after")]


def test_batches_of_a_plan_are_batches_in_its_graph(
    device: GraphDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[Plan | None] = [None]
    monkeypatch.setattr(Planner, "captured_plan", lambda planner: held[0])
    theirs, model = step(made()), made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with ssdtrain.offload(model, **SETTINGS, plan="auto") as session:
        for _ in range(4):
            assert same(step(model), theirs)
            optimizer.step()
        alone = all_moved(session)
        orders = {
            kind: tuple(replace(o, load_at=0, load_batch=1 + n // 3) for n, o in each)
            for kind, each in ((k, list(enumerate(v))) for k, v in alone.orders.items())
        }
        num_edges = []
        for plan in (alone, replace(alone, orders=orders)):
            held[:] = [plan]
            del device.edges[:], device.copies[:]
            with device.graph():
                assert same(step(model), theirs)
            num_in = sum(not outwards for outwards, _, _ in device.copies)
            num_edges.append(len(device.edges) / num_in)
    assert num_edges[1] < num_edges[0] - 0.5
