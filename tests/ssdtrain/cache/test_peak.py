"""The predicted peak against the metered one: device memory, not saved bytes alone."""

import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ssdtrain
from ssdtrain.engines.hints import Hints, Stage
from ssdtrain.observe import plainsteps
from ssdtrain.observe.room import Room
from ssdtrain.plan.choose import options
from ssdtrain.plan.plan import Plan
from ssdtrain.plan.schedule import Style, schedule
from ssdtrain.plan.simulate import simulate
from ssdtrain.plan.timeline import Timeline
from ssdtrain.transfer.device import CpuDevice
from tests.ssdtrain.cache.metered import Meter
from tests.ssdtrain.virtual_time import VirtualTime

WIDTH, ROWS = 128, 256
SETTINGS: dict[str, Any] = {"max_overhead": 0.01, "target": "host", "min_bytes": 0}
TOLERANCE = 0.03
LOSS_BYTES = ROWS * WIDTH * 4
"""Of a tensor of the loss: it runs between the same marks as the end of forward, when
frames let go, and both count."""


class Block(nn.Module):
    """What a transformer's block saves: norms, an attention, an MLP, dropouts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.proj(self.attention(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))

    def attention(self, x: Tensor) -> Tensor:
        """(ROWS, WIDTH) to the same."""
        q, k, v = self.qkv(self.norm1(x)).view(1, ROWS, 3, 2, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).reshape(ROWS, WIDTH)


class Holding(Block):
    """The same; its locals hold what they name until it returns."""

    def forward(self, x: Tensor) -> Tensor:
        norm1 = self.norm1(x)
        q, k, v = self.qkv(norm1).view(1, ROWS, 3, 2, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        projected = self.proj(y.transpose(1, 2).reshape(ROWS, WIDTH))
        middle = x + self.dropout(projected)
        norm2 = self.norm2(middle)
        up = self.up(norm2)
        gelu = F.gelu(up)
        down = self.down(gelu)
        return middle + self.dropout(down)


class Blocks(nn.Module):
    """Its local holds the first block's input until the last block has ended."""

    def __init__(self, first: nn.Module, block: type[Block]) -> None:
        super().__init__()
        self.first = first
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        embedded = y = self.first(x)
        for block in self.blocks:
            y = block(y)
        assert embedded is not y
        return y


class Broadcast(nn.Module):
    """A product whose gradient autograd sums behind the operator that made it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        many = torch.stack([x.sin(), x.cos()])
        return self.scale * (many * x.tanh()).mean(0)


class Start(nn.Module):
    """Saves nothing. The leaf behind it is autograd's until its gradient is there."""

    def forward(self, x: Tensor) -> Tensor:
        return -x


def net(first: nn.Module, block: type[Block] = Block) -> nn.Module:
    """Three blocks behind the first module, with gradients in place."""
    torch.manual_seed(0)
    if block is Holding:
        model: nn.Module = Blocks(first, block)
    else:
        model = nn.Sequential(first, *(block() for _ in range(3)))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def step(model: nn.Module, x: Tensor, meter: Meter, hints: Hints | None = None) -> int:
    """One training step; its peak above its start, in bytes."""
    meter.reset_peak()
    start, highest = meter.now_bytes, []
    # An observed step resets the peak at every mark.
    reset = meter.reset_peak
    meter.reset_peak = lambda: (highest.append(meter.peak_bytes), reset())[1]  # type: ignore[method-assign]
    if hints is not None:
        hints.set_stage(Stage.FORWARD, micro_batch=0)
    loss = model(x).square().mean()
    if hints is not None:  # as a pipeline's stage does before it waits for the next one
        hints.set_next_stage(Stage.BACKWARD, micro_batch=0)
        hints.prefetch_last_module()
    loss.backward()
    meter.reset_peak()
    meter.reset_peak = reset  # type: ignore[method-assign]
    x.grad = None
    with torch.no_grad():
        torch.autograd.graph.increment_version(list(model.parameters()))
    return max(highest) - start


def broadcast_net(first: nn.Module, block: type[Block]) -> nn.Module:
    """Nothing else, with the same signature as `net`."""
    model = nn.Sequential(first, Broadcast())
    model[1].scale.grad = torch.zeros(())
    return model


START = Start()
Trained = tuple[list[int], ssdtrain.Session]


def training(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Trained]:
    """Peaks of some steps under these settings."""

    def run(
        num_steps: int,
        first: nn.Module = START,
        block: type[Block] = Block,
        announced: bool = False,
        **settings: Any,
    ) -> Trained:
        meter = Meter()
        meter.install(monkeypatch)
        model, x = net(first, block), torch.randn(ROWS, WIDTH, requires_grad=True)
        for parameter in model.parameters():
            meter.add(parameter)
            meter.add(parameter.grad)  # type: ignore[arg-type]
        meter.add(x)
        with ssdtrain.offload(model, **{**SETTINGS, **settings}) as session, meter:
            hints = session.hints if announced else None
            peaks = [step(model, x, meter, hints) for _ in range(num_steps)]
        return peaks, session

    return run


@pytest.fixture
def trained(
    monkeypatch: pytest.MonkeyPatch, virtual_time: VirtualTime
) -> Callable[..., Trained]:
    """`training` in virtual time: what is planned depends on no load."""
    return training(monkeypatch)


@pytest.mark.parametrize(
    ("block", "recompute", "overhead"),
    [
        *((Block, "auto", 0.05), (Block, "off", 1.0)),
        *((Holding, "auto", 1.0), (Holding, "off", 0.05)),
    ],
)
def test_the_predicted_peak_is_the_metered_one(
    block: type[Block], recompute: str, overhead: float, trained: Callable[..., Trained]
) -> None:
    keep = trained(2, block=block, plan="keep-all", recompute="off")[0][-1]
    peaks, session = trained(
        5, block=block, plan="auto", recompute=recompute, max_overhead=overhead
    )
    assert session.plan is not None and session.plan.prediction is not None
    predicted = session.plan.prediction
    assert predicted.keep_peak_bytes == pytest.approx(keep, rel=TOLERANCE)
    assert predicted.peak_bytes < 0.7 * keep
    both = LOSS_BYTES if block is Holding else 0
    assert (1 - TOLERANCE) * peaks[-1] < predicted.peak_bytes
    assert predicted.peak_bytes < (1 + TOLERANCE) * peaks[-1] + both


class Littering(nn.Module):
    """Each of its steps frees the garbage of the one before; the first leaves some."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def forward(self, x: Tensor) -> Tensor:
        gc.collect()
        ring: list[object] = [torch.empty(self.num_bytes, dtype=torch.uint8)]
        ring.append(ring)
        gc.collect()  # it is old, and nobody looks for it soon
        self.num_bytes = 0
        return -x


def test_what_the_observed_step_frees_is_no_room(
    trained: Callable[..., Trained],
) -> None:
    found = []
    for num_bytes in (0, 64 * ROWS * WIDTH):
        first = Littering()
        first.num_bytes = num_bytes
        _, session = trained(5, first, plan="auto", max_overhead=0.05)
        assert session.plan is not None and session.plan.prediction is not None
        found.append(session.plan.prediction.keep_peak_bytes)
    assert found[0] == found[1]


@pytest.mark.parametrize("block", [Block, Holding])
def test_the_peak_of_any_plan_is_predicted(
    block: type[Block], monkeypatch: pytest.MonkeyPatch, virtual_time: VirtualTime
) -> None:
    meter, draw = Meter(), random.Random(0)
    meter.install(monkeypatch)
    model, x = net(START, block), torch.randn(ROWS, WIDTH, requires_grad=True)
    settings: dict[str, Any] = {"plan": "auto", "max_overhead": 1.0}
    with ssdtrain.offload(model, **{**SETTINGS, **settings}) as session, meter:
        for _ in range(4):
            step(model, x, meter)
        assert session.profile is not None
        timeline = Timeline(session.profile)
        for number in range(6):
            placements = {
                kind: [draw.choice(options(timeline, item)) for item in items]
                for kind, items in session.profile.kinds.items()
            }
            window = draw.choice([None, 1 << 18, 1 << 20])
            orders = schedule(timeline, placements, Style(window_bytes=window))
            session.follow(Plan(orders=orders, policy="random"))
            peaks = [step(model, x, meter) for _ in range(2)]
            predicted = simulate(timeline, orders).peak_bytes
            # Where the peak is the loss's, what frames hold may count twice.
            both = LOSS_BYTES if block is Holding else 0
            assert 0.995 * peaks[-1] < predicted < 1.005 * peaks[-1] + both, number
        assert not session.steps[-1].fallbacks


def test_what_is_kept_outlives_the_sums_of_its_operators_gradients(
    trained: Callable[..., Trained], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.ssdtrain.cache.test_peak.net", broadcast_net)
    keep = trained(2, plan="keep-all", recompute="off")[0][-1]
    _, session = trained(3, plan="auto", recompute="off", window_bytes=1)
    assert session.plan is not None and session.plan.prediction is not None
    assert session.plan.prediction.keep_peak_bytes == pytest.approx(keep, rel=0.001)


def test_a_backward_that_was_announced_loads_no_more_than_predicted(
    trained: Callable[..., Trained],
) -> None:
    settings = {"plan": "auto", "recompute": "off", "max_overhead": 0.5}
    peaks, session = trained(5, announced=True, **settings)
    assert session.plan is not None and session.plan.prediction is not None
    assert session.steps[-1].bytes_reloaded and not session.steps[-1].fallbacks
    predicted = session.plan.prediction.peak_bytes
    assert predicted == pytest.approx(peaks[-1], rel=TOLERANCE)


@pytest.mark.parametrize("overhead", [0.0, 1.0])
def test_a_saved_leaf_is_in_no_peak(
    overhead: float, trained: Callable[..., Trained]
) -> None:
    first, settings = nn.Identity(), {"recompute": "off"}
    keep = trained(2, first, plan="keep-all", **settings)[0][-1]
    peaks, session = trained(5, first, plan="auto", max_overhead=overhead, **settings)
    assert session.plan is not None and session.plan.prediction is not None
    predicted = session.plan.prediction
    assert predicted.keep_peak_bytes == pytest.approx(keep, rel=0.01)
    assert predicted.peak_bytes == pytest.approx(peaks[-1], rel=0.01)


def test_observing_a_step_leaves_no_memory_behind(
    trained: Callable[..., Trained],
) -> None:
    _, session = trained(3, plan="auto", max_overhead=1.0)
    assert session.cache.is_idle
    window = session.cache.window
    assert window.num_bytes == window.lingering_bytes == 0


@pytest.mark.usefixtures("quick_links")
def test_a_plain_step_is_measured_where_it_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained = training(monkeypatch)
    monkeypatch.setattr(CpuDevice, "capacity_bytes", lambda device: 1 << 33)
    monkeypatch.setattr(plainsteps, "ALIKE", 100.0)  # whatever else runs here
    keep = trained(2, plan="keep-all", recompute="off")[0][-1]
    peaks, session = trained(8, plan="auto", max_overhead=1.0)
    assert session.profile is not None and session.plan is not None
    plain_ms = float(session.profile.notes["plain_step_ms"])
    assert session.plan.prediction is not None
    assert session.plan.prediction.keep_ms == pytest.approx(plain_ms, rel=1e-3)
    # The warm-up, the observed step, three without ssdtrain, and the plan.
    saved = [report.bytes_saved > 0 for report in session.steps]
    assert saved == [True, True, False, False, False, True, True, True]
    assert peaks[3] == pytest.approx(keep, rel=TOLERANCE)
    assert peaks[-1] < 0.7 * keep


@pytest.mark.parametrize(("share", "stuck"), [(1.0, 0.0), (2.0, 1.0)])
def test_no_plain_step_where_it_may_not_fit(
    share: float,
    stuck: float,
    trained: Callable[..., Trained],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor where the allocator could not give back what is free."""
    keep = trained(2, plan="keep-all", recompute="off")[0][-1]
    capacity = int(share * keep)
    monkeypatch.setattr(CpuDevice, "capacity_bytes", lambda device: capacity)

    def trim(room: Room) -> None:
        room.stuck_bytes = int(stuck * keep)

    monkeypatch.setattr(Room, "trim", trim)
    _, session = trained(6, plan="auto", max_overhead=1.0)
    assert all(report.bytes_saved > 0 for report in session.steps)
    assert session.profile is not None
    assert "plain_step_ms" not in session.profile.notes


class Adapted(nn.Module):
    """A frozen product and a trained one of low rank beside it, as adapters have it."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(num_in, num_out, bias=False).requires_grad_(False)
        self.down = nn.Linear(num_in, 2, bias=False)
        self.up = nn.Linear(2, num_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, num_in) to (rows, num_out)."""
        wide: Tensor = self.frozen(x)
        return wide + self.up(self.down(x)) * 2.0


class Gated(nn.Module):
    """An MLP whose last product's input has two gradients, which autograd sums when
    the input itself is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = Adapted(WIDTH, 8 * WIDTH), Adapted(WIDTH, 8 * WIDTH)
        self.down = Adapted(8 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("overhead", [0.0, 1.0])
def test_two_gradients_are_summed_when_their_tensor_is_gone(
    overhead: float, trained: Callable[..., Trained], monkeypatch: pytest.MonkeyPatch
) -> None:
    def adapted_net(first: nn.Module, block: type[Block]) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(first, *(Gated() for _ in range(2)))
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        return model

    monkeypatch.setattr("tests.ssdtrain.cache.test_peak.net", adapted_net)
    keep = trained(2, plan="keep-all", recompute="off")[0][-1]
    peaks, session = trained(5, plan="auto", recompute="off", max_overhead=overhead)
    assert session.plan is not None and session.plan.prediction is not None
    predicted = session.plan.prediction
    assert predicted.keep_peak_bytes == pytest.approx(keep, rel=0.005)
    assert predicted.peak_bytes == pytest.approx(peaks[-1], rel=0.005)


class Table(nn.Module):
    """An embedding whose gradient is larger than all saved tensors: it is made behind
    the last of them, at the end of backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(100 * ROWS, WIDTH))
        self.register_buffer("ids", torch.arange(ROWS))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.embedding(self.ids, self.weight)


@pytest.mark.parametrize("num_backwards", [1, 2])
def test_what_backward_needs_behind_the_last_saved_tensor_is_in_the_peak(
    num_backwards: int,
    trained: Callable[..., Trained],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blocks, one_step = net, step

    def tabled_net(first: nn.Module, block: type[Block]) -> nn.Module:
        model = blocks(Table(), block)
        model[0].weight.grad = torch.zeros_like(model[0].weight)
        return model

    def accumulating(*args: Any) -> int:
        return max([one_step(*args) for _ in range(num_backwards)])

    monkeypatch.setattr("tests.ssdtrain.cache.test_peak.net", tabled_net)
    monkeypatch.setattr("tests.ssdtrain.cache.test_peak.step", accumulating)
    peaks, session = trained(5, plan="auto", recompute="off", max_overhead=1.0)
    assert session.plan is not None and session.plan.prediction is not None
    table_bytes = 100 * ROWS * WIDTH * 4
    assert peaks[-1] > table_bytes > 0.8 * peaks[-1]
    predicted = session.plan.prediction.peak_bytes
    assert predicted == pytest.approx(peaks[-1], rel=TOLERANCE)
