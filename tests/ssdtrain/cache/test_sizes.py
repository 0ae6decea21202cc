"""Batches of another size follow the plan of the observed one."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ssdtrain
from ssdtrain.counters import Fallback
from ssdtrain.observe import planner, searching
from ssdtrain.observe.largest import HEADROOM
from ssdtrain.observe.strays import Strays
from ssdtrain.plan.placement import Placement
from ssdtrain.plan.plan import Order, Plan
from ssdtrain.plan.search import Answer, Request, answers
from ssdtrain.transfer.device import CpuDevice
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.cache.heldsearch import Searches
from tests.ssdtrain.eventually import until

WIDTH, ROWS, HEADS = 16, 32, 2
SETTINGS: dict[str, Any] = {"max_overhead": 0.01, "target": "host", "min_bytes": 0}
KEPT = {**SETTINGS, "plan": "keep-all", "recompute": "off", "verify": "checksum"}
"""Nothing leaves; verified, as steps without hooks count no bytes."""
UNPLANNED = {Fallback.PLAN_MISMATCH.value, Fallback.PLAN_OUTGROWN.value}


class Block(nn.Module):
    """An attention and an MLP; rows are tokens of one sequence."""

    def __init__(self, num_heads: int = HEADS) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            self.qkv(self.norm(x))
            .view(len(x), 3, self.num_heads, -1)
            .permute(1, 2, 0, 3)
        )
        scores = (q @ k.transpose(1, 2)).softmax(-1)
        x = x + self.proj((scores @ v).transpose(0, 1).reshape(len(x), WIDTH))
        return x + self.down(F.gelu(self.up(x)))


def moved(plan: Plan) -> Plan:
    """Everything leaves, and comes back at its use."""
    return _every(plan, lambda at: (Placement.OFFLOAD, 1))


def mixed(plan: Plan) -> Plan:
    """A third leaves, a third stays, a third leaves late."""
    return _every(
        plan,
        lambda at: [
            (Placement.KEEP, 0),
            (Placement.OFFLOAD, 1),
            (Placement.OFFLOAD, 4),
        ][at % 3],
    )


def _every(plan: Plan, place: Callable[[int], tuple[Placement, int]]) -> Plan:
    orders = {}
    for kind, own in plan.orders.items():
        placed = [place(at) for at in range(len(own))]
        orders[kind] = tuple(
            Order(
                name=order.name,
                num_bytes=order.num_bytes,
                placement=placement,
                release_after=after,
                load_at=(len(own) - at) // 2 if after else 0,
                owner=order.owner,
            )
            for at, (order, (placement, after)) in enumerate(
                zip(own, placed, strict=True)
            )
        )
    return Plan(orders=orders, policy="given")


def train(
    lengths: Sequence[int],
    plan_of: Callable[[Plan], Plan] | None,
    settings: dict[str, Any] | None,
    make: Callable[[], nn.Module] = lambda: nn.Sequential(Block(), Block()),
) -> tuple[list[Tensor], list[ssdtrain.StepReport], Any]:
    torch.manual_seed(0)
    net = make()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    session = None if settings is None else ssdtrain.offload(net, **settings)
    seen: list[Tensor] = []
    for step, rows in enumerate(lengths):
        x = torch.randn(rows, WIDTH, requires_grad=True)
        loss = net(x).square().mean()
        loss.backward()
        seen += [loss.detach(), x.grad]  # type: ignore[list-item]
        seen += [p.grad.clone() for p in net.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        if session is not None and plan_of is not None and step == 3:
            assert session.plan is not None
            session.follow(plan_of(session.plan))
    reports = [] if session is None else list(session.steps)
    return seen, reports, session


@pytest.mark.parametrize("plan_of", [None, moved, mixed])
@pytest.mark.parametrize("recompute", ["auto", "off"])
def test_lengths_drawn_at_random_follow_one_plan(
    plan_of: Callable[[Plan], Plan] | None, recompute: str
) -> None:
    """Bitwise, nothing is observed again, and every lane follows the plan."""
    draw = random.Random(0)
    lengths = [ROWS] * 6 + [draw.randint(ROWS // 4, 4 * ROWS) for _ in range(14)]
    lengths += [ROWS // 4, 4 * ROWS, ROWS, ROWS]
    settings = {**SETTINGS, "recompute": recompute, "max_overhead": 0.2}
    theirs, _, _ = train(lengths, None, None)
    ours, reports, session = train(lengths, plan_of, settings)
    assert same_bits(ours, theirs)
    mismatch = Fallback.PLAN_MISMATCH.value
    assert not any(mismatch in report.fallbacks for report in reports)
    if plan_of is not None:
        for report, length in zip(reports[6:], lengths[6:], strict=True):
            # All that is saved grows with the length, the scores with its square.
            factor = length / ROWS
            usual = reports[5].bytes_offloaded
            low, high = sorted((factor, factor * factor))
            assert low * usual * 0.9 <= report.bytes_offloaded <= high * usual * 1.1
            assert (report.num_resized > 0) == (length != ROWS)
    assert reports[-1].saved_peak_bytes == reports[5].saved_peak_bytes
    session.close()
    assert session.live_bytes == 0


def test_another_program_leaves_the_plan() -> None:
    lengths = [ROWS] * 6 + [8 * ROWS + 8]
    _, reports, session = train(lengths, moved, SETTINGS)
    assert reports[-1].fallbacks[Fallback.PLAN_MISMATCH.value] == 1
    session.close()


def test_micro_batches_of_one_step_may_differ() -> None:
    """The observed step has two lengths; its profile is the longer one's."""
    lengths = (ROWS, 2 * ROWS, ROWS // 2)
    seen: list[list[Tensor]] = []
    for settings in (None, SETTINGS):
        torch.manual_seed(0)
        net = nn.Sequential(Block(), Block())
        session = None if settings is None else ssdtrain.offload(net, **settings)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        found: list[Tensor] = []
        for _ in range(6):
            for rows in lengths:
                net(torch.randn(rows, WIDTH)).square().mean().backward()
            found += [p.grad.clone() for p in net.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
        seen.append(found)
        if session is not None:
            report, profile = session.last_step, session.profile
            session.close()
    assert same_bits(*seen)
    assert profile is not None and report is not None
    rows = {item.name for item in profile.kinds["model/0"]}
    assert any(f"[{2 * ROWS}x{4 * WIDTH}]" in name for name in rows)
    assert Fallback.PLAN_MISMATCH.value not in report.fallbacks


@pytest.mark.parametrize("least_bytes", [700, 2048, 4096])
@pytest.mark.parametrize("plan_of", [None, moved])
def test_what_is_an_item_depends_on_no_length(
    plan_of: Callable[[Plan], Plan] | None, least_bytes: int
) -> None:
    """`min_bytes` lies between a tensor's bytes at one length and at another."""
    draw = random.Random(1)
    lengths = [ROWS] * 5 + [ROWS // 4, 4 * ROWS]
    lengths += [draw.randint(ROWS // 4, 4 * ROWS) for _ in range(8)]
    settings = {**SETTINGS, "min_bytes": least_bytes, "max_overhead": 0.2}
    for first in lengths[5:7]:  # the table is made of this one
        own = [*lengths[:4], first, *lengths[5:]]
        theirs, _, _ = train(own, None, None)
        ours, reports, session = train(own, plan_of, settings)
        assert same_bits(ours, theirs)
        assert not any(UNPLANNED & set(report.fallbacks) for report in reports)
        session.close()
        assert session.live_bytes == 0


def test_a_table_tells_sizes_over_the_plans() -> None:
    """Whatever the length of the lane that it was made of."""
    lengths = [ROWS] * 4 + [3 * ROWS] * 3 + [ROWS, 2 * ROWS, ROWS // 2, 3 * ROWS, ROWS]
    torch.manual_seed(0)
    net = nn.Sequential(Block(), Block())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with ssdtrain.offload(net, **{**SETTINGS, "max_overhead": 0.2}) as session:
        cursor = session.cache.cursor
        for step, rows in enumerate(lengths):
            net(torch.randn(rows, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 3:
                assert session.plan is not None
                session.follow(moved(session.plan))
            if step < 5:
                continue
            assert (cursor.num_resized > 0) == (rows != ROWS), (step, rows)
            if rows != ROWS:
                # Attention's scores grow with the square.
                found = cursor.resized_bytes / cursor.planned_bytes
                low, high = sorted((rows / ROWS, (rows / ROWS) ** 2))
                assert low <= found <= high, (step, rows)


class Turning(nn.Module):
    """A block that is given two more tensors, of which autograd saves other views."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.inner(x)[None]
        return x + torch.tanh((y * cos[None] + y.flip(-1) * sin[None])[0])


class Turned(nn.Module):
    """Layers that share what they turn by."""

    def __init__(self, kind: type[Turning] = Turning) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(kind() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.numel(), dtype=torch.float32).view(x.shape) / 100
        x, cos, sin = self.first(x), angles.cos(), angles.sin()
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x


def with_floating_items(
    lengths: list[int], make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> list[ssdtrain.StepReport]:
    """Steps bitwise those without ssdtrain, under plans with inputs of regions that may
    be saved later; reports."""
    monkeypatch.setattr(CpuDevice, "capacity_bytes", lambda device: 1)
    settings = {**SETTINGS, "memory_budget_bytes": 10**9, "verify": "checksum"}
    theirs, _, _ = train(lengths, None, None, make)
    ours, reports, session = train(lengths, None, settings, make)
    assert session.plan is not None
    session.close()
    assert same_bits(ours, theirs)
    assert any(item.floats for item in session.profile.kinds["model/0"])
    for report in reports:
        assert not UNPLANNED & set(report.fallbacks), report.step
    return reports


def test_an_input_of_a_region_may_be_saved_as_another_view(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The observed step runs regions again, and stores their inputs; under the plan
    the first layer saves views of them. At any length."""
    draw = random.Random(2)
    lengths = [2 * ROWS] * 8 + [draw.randint(ROWS, 2 * ROWS) for _ in range(12)]
    reports = with_floating_items(lengths, Turned, monkeypatch)
    assert any(report.num_resized for report in reports)


class Scaled(Turning):
    """Saves an input of its own first, of as many dimensions as what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.rand(ROWS, 2 * WIDTH)  # no buffer: those never move

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        halves = x.view(-1, 2 * WIDTH) * self.scale
        return super().forward(x + halves.mean(), cos, sin)


def test_what_floats_is_not_taken_for_what_comes_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A region's inputs may be saved later where it does not run again: what is saved
    first is one of the plan's size, and not one of them at another size."""
    reports = with_floating_items([2 * ROWS] * 10, lambda: Turned(Scaled), monkeypatch)
    assert not any(report.num_resized for report in reports)


def drawn(seed: int) -> Callable[[Plan], Plan]:
    """Some stay, the others leave sooner or later."""
    draw = random.Random(seed)

    def place(at: int) -> tuple[Placement, int]:
        if draw.random() < 0.6:
            return Placement.KEEP, 0
        return Placement.OFFLOAD, draw.choice([1, 1, 2, 4])

    return lambda plan: _every(plan, place)


@pytest.mark.parametrize(
    ("seed", "recompute", "first"),
    [(0, "off", ROWS - 5), (15, "auto", ROWS // 4), (10, "off", 2 * ROWS)],
)
def test_what_is_alive_depends_on_no_length_of_before(
    seed: int, recompute: str, first: int
) -> None:
    """A table is made of the first lane under a plan. Rows of later ones count what
    their own tensors have, when those of equal size would."""
    settings = {**SETTINGS, "recompute": recompute}
    peaks = []
    for length in (ROWS, first):
        lengths = [*[ROWS] * 4, length, ROWS, first, ROWS]
        _, reports, session = train(lengths, drawn(seed), settings)
        assert session.live_bytes == 0
        tables = session.cache.tables.tables.values()
        assert any(table.is_resized for table in tables) == (length != ROWS)
        session.close()
        peaks.append([report.saved_peak_bytes for report in reports[5:]])
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize("first", [ROWS, ROWS // 2, 2 * ROWS])
def test_a_budget_holds_for_every_batch(first: int) -> None:
    """Also for the first one of a size that was never seen, with a table and without
    one, of whatever length."""
    lengths = [ROWS] * 4 + [first] * 2 + [2 * ROWS] * 4 + [ROWS] * 2 + [2 * ROWS] * 2
    theirs, reports, _ = train(lengths, None, KEPT)
    budget = int(0.6 * reports[7].saved_peak_bytes)
    assert reports[3].saved_peak_bytes < budget
    settings = {**SETTINGS, "memory_budget_bytes": budget, "window_bytes": 1}
    ours, reports, session = train(lengths, None, settings)
    assert same_bits(ours, theirs)
    peaks = [report.saved_peak_bytes for report in reports]
    assert max(peaks) <= budget
    outgrown = [Fallback.PLAN_OUTGROWN.value in report.fallbacks for report in reports]
    assert outgrown.count(True) == 1 and outgrown[min(6, lengths.index(2 * ROWS))]
    assert Fallback.PLAN_MISMATCH.value not in reports[-1].fallbacks
    session.close()


def test_a_budget_holds_for_another_program() -> None:
    """What leaves its plan waits for the link rather than stays."""
    lengths = [ROWS] * 6 + [10 * ROWS] * 2
    every = {**SETTINGS, "plan": "offload-all", "window_bytes": 1}
    _, moved, _ = train(lengths, None, every)
    budget = int(1.15 * moved[5].saved_peak_bytes)  # some plan needs that much
    settings = {**SETTINGS, "memory_budget_bytes": budget, "window_bytes": 1}
    _, reports, session = train(lengths, None, settings)
    assert UNPLANNED & set(reports[-1].fallbacks)
    assert reports[-1].saved_peak_bytes <= 1.05 * moved[-1].saved_peak_bytes
    assert Fallback.KEPT_BACK_PRESSURE.value not in reports[-1].fallbacks
    session.close()


Ask = Callable[[int], Tensor]
"""From the length of a batch to its loss."""


def qwen() -> tuple[nn.Module, Ask]:
    """An attention that saves no scores."""
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = transformers.Qwen3Config(vocab_size=64, use_cache=False, **shape, **heads)
    model = transformers.Qwen3ForCausalLM(config)

    def ask(length: int) -> Tensor:
        ids = torch.randint(0, 64, (1, length))
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        return loss

    return model, ask


def blocks() -> tuple[nn.Module, Ask]:
    """Half of what they save are scores, which grow with the square of the length."""
    model = nn.Sequential(*(Block(num_heads=2 * HEADS) for _ in range(4)))
    return model, lambda length: model(torch.randn(length, WIDTH)).square().mean()


def train_lengths(
    make: Callable[[], tuple[nn.Module, Ask]],
    lengths: list[int],
    settings: dict[str, Any],
) -> tuple[list[Tensor], ssdtrain.Session]:
    """Losses and gradients of a step of each length."""
    torch.manual_seed(0)
    model, ask = make()
    session = ssdtrain.offload(model, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Tensor] = []
    for length in lengths:
        loss = ask(length)
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return seen, session


@pytest.mark.usefixtures("roomy", "virtual_time")
@pytest.mark.parametrize("make", [qwen, blocks])
def test_a_budget_holds_in_every_step(
    make: Callable[[], tuple[nn.Module, Ask]],
) -> None:
    """The observed batch is the shortest but one and would fit if all were kept. Those
    behind it, before its plan and under it, do not. Scores taken to grow with the
    length once made it 13 % more than the budget."""
    draw = random.Random(0)
    lengths = [24, 20, 16] + [draw.randint(17, 64) for _ in range(11)]
    keep = {"max_overhead": 0.01, **KEPT, "min_bytes": 1}
    theirs, session = train_lengths(make, lengths, keep)
    kept = [report.saved_peak_bytes for report in session.steps]
    session.close()
    budget = max(kept) // 2
    assert kept[1] < budget < max(kept[2:6])
    # Steps without hooks would report nothing.
    settings = {
        "max_overhead": 0.01,
        **keep,
        "plan": "auto",
        "recompute": "auto",
        "window_bytes": 1,
    }
    ours, session = train_lengths(
        make, lengths, {**settings, "memory_budget_bytes": budget}
    )
    assert same_bits(ours, theirs)
    reports, plan = list(session.steps), session.plan
    session.close()
    assert plan is not None
    assert all(report.bytes_saved > 0 for report in reports)
    assert max(report.saved_peak_bytes for report in reports) <= budget
    outgrown = [Fallback.PLAN_OUTGROWN.value in report.fallbacks for report in reports]
    longest = [0] + [max(lengths[: step + 1]) for step in range(len(lengths))]
    for step, length in enumerate(lengths):
        # The first plan, too, has room for whatever was met before it, and some more.
        assert not outgrown[step] or length > HEADROOM * longest[step], step
    assert any(outgrown)


def test_a_batch_that_no_plan_has_room_for_ends_no_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What does not grow with a batch is taken to grow, so that there may be room for
    it all the same: the plan is for the observed one, and it goes another way."""
    ratios: list[float] = []

    def small(request: Request) -> Iterator[Answer]:
        ratios.append(request.ratio)
        found = answers(request) if request.ratio == 1.0 else [Answer(error="none")]
        yield from found

    monkeypatch.setattr(searching, "answers", small)
    lengths = [2 * ROWS, ROWS, ROWS, ROWS, 2 * ROWS, ROWS]
    theirs, reports, _ = train(lengths, None, KEPT)
    budget = int(0.6 * reports[0].saved_peak_bytes)
    settings = {**SETTINGS, "memory_budget_bytes": budget, "window_bytes": 1}
    ours, reports, session = train(lengths, None, settings)
    assert session.plan is not None
    session.close()
    assert same_bits(ours, theirs)
    assert max(report.saved_peak_bytes for report in reports) <= budget
    outgrown = [Fallback.PLAN_OUTGROWN.value in report.fallbacks for report in reports]
    assert outgrown == [False] * 4 + [True, False]
    # For the longer one: soon, and then as long as a search may take.
    assert ratios[0] > 2 and ratios == [ratios[0], 1.0, ratios[0], ratios[0]]


def test_a_plan_is_for_the_largest_batch_so_far() -> None:
    """Also where that came before the observed one, and with some headroom."""
    lengths = [2 * ROWS, ROWS, 2 * ROWS, int(2.06 * ROWS), ROWS]
    _, reports, _ = train(lengths, None, KEPT)
    budget = int(0.6 * reports[3].saved_peak_bytes)
    settings = {**SETTINGS, "memory_budget_bytes": budget, "window_bytes": 1}
    _, reports, session = train(lengths, None, settings)
    session.close()
    for report in reports:
        assert report.saved_peak_bytes <= budget
        assert not UNPLANNED & set(report.fallbacks), report.step


class Beside:
    """Trains where plans are searched for beside training, as on a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, budget_bytes: int) -> None:
        monkeypatch.setattr(CpuDevice, "runs_beside", True)
        self.searches = Searches(monkeypatch)
        self.planners: list[planner.Planner] = []
        build = planner.Planner.__init__

        def built(own: planner.Planner, *args: Any, **settings: Any) -> None:
            build(own, *args, **settings)
            self.planners.append(own)

        monkeypatch.setattr(planner.Planner, "__init__", built)
        torch.manual_seed(0)
        self._model = nn.Sequential(Block(), Block())
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.1)
        settings = {**SETTINGS, "memory_budget_bytes": budget_bytes, "window_bytes": 1}
        self.session = ssdtrain.offload(self._model, **settings)

    def step(self, rows: int) -> ssdtrain.StepReport:
        """One step, of a batch of so many rows."""
        self._model(torch.randn(rows, WIDTH)).square().mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        report = self.session.last_step
        assert report is not None
        return report

    def settle(self, rows: int) -> None:
        """Steps until no plan is searched for."""
        session = self.session
        until(
            lambda: session.plan is not None and session.is_settled,
            lambda: self.step(rows),
        )


def budget_of(rows: int, share: float) -> int:
    """A share of what such a batch saves."""
    _, reports, session = train([rows] * 2, None, KEPT)
    session.close()
    return int(share * reports[-1].saved_peak_bytes)


def test_batches_that_grow_wait_for_a_plan_and_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each is larger than what is searched for; the search goes on, and ends."""
    budget = budget_of(3 * ROWS, 0.6)
    beside = Beside(monkeypatch, budget)
    beside.settle(ROWS)
    num_searches = len(beside.searches.begun)
    beside.searches.are_held = True
    for rows in range(2 * ROWS, 3 * ROWS, 4):  # a tenth more each time
        report = beside.step(rows)
        assert Fallback.PLAN_OUTGROWN.value in report.fallbacks
        assert report.saved_peak_bytes <= budget
    beside.searches.are_held = False
    beside.settle(3 * ROWS)
    report = beside.step(3 * ROWS)
    assert not UNPLANNED & set(report.fallbacks) and report.num_resized
    assert report.saved_peak_bytes <= budget
    assert not beside.searches.given_up
    assert len(beside.searches.begun) <= num_searches + 3
    beside.session.close()


def test_there_is_room_for_what_comes_while_a_step_is_observed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Larger batches come behind the observed one."""
    monkeypatch.setattr(CpuDevice, "capacity_bytes", lambda device: 1)
    budget = budget_of(ROWS, 0.9)
    beside = Beside(monkeypatch, budget)
    beside.settle(ROWS)
    (own,) = beside.planners
    step = Strays.step
    monkeypatch.setattr(Strays, "step", lambda *_: True)
    beside.step(ROWS)
    monkeypatch.setattr(Strays, "step", step)
    assert own.stage is planner.Purpose.OBSERVING
    rows, stages = ROWS + ROWS // 8, []
    while not beside.session.is_settled:
        # In each step but the observed one, all regions run again.
        report = beside.step(rows if len(stages) > 1 else ROWS)
        assert report.saved_peak_bytes <= budget
        stages.append(own.stage)
    assert planner.Purpose.BASE in stages
    report = beside.step(rows)
    assert Fallback.PLAN_OUTGROWN.value not in report.fallbacks
    assert report.saved_peak_bytes <= budget
    beside.session.close()
