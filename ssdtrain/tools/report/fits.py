"""Will it fit, how fast, and what is the best way: an answer before the run. One
capture on the meta device gives a profile; plain training, checkpointing and ssdtrain's
plan are prices of it, by the simulator that plans are made with."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ssdtrain.errors import ConfigError
from ssdtrain.plan.baselines import fixed_policies
from ssdtrain.plan.choose import choose
from ssdtrain.plan.goal import DEVICE_RESERVE, Goal
from ssdtrain.plan.placement import Placement
from ssdtrain.plan.plan import Order
from ssdtrain.plan.profile import Profile
from ssdtrain.plan.schedule import schedule
from ssdtrain.plan.simulate import Simulation, keep_all, simulate
from ssdtrain.plan.timeline import Timeline
from ssdtrain.plan.unsearched import again_moving, num_read
from ssdtrain.quantities import bytes_text
from ssdtrain.tools.foresight.cluster import DEFAULT, cluster_of
from ssdtrain.tools.foresight.device import load_device
from ssdtrain.tools.report.build_public import Loss, Shape, Train, shape_of
from ssdtrain.tools.report.capture import Captured, Question, captured_step
from ssdtrain.tools.report.selective import selective

SEARCHED_STEPS = 300
"""That the search for a plan simulates: one to three seconds."""
WIDER = 4
"""The largest step is looked for up to so many times the size asked for; tokens also
down."""
PROBES, FARTHER = 3, 16
"""Larger steps that are tried, each up to so many times the largest one before."""
KEPT_LAST = 3
"""Inputs of the last regions that may stay, for the least memory."""
ROOM = 0.75
"""Share of a device for weights, gradients and optimizer, as proposed."""
CONTEXT = 1024
"""Tokens in which the longest context is told."""
MANY = 12_000
"""Operators of all further steps that are tried: a thousand take a second or so."""
HOST_SHARE = 0.1
"""Of a plain step, from which on it is said that the host bounds it."""
ALIKE = 0.02
"""Steps that differ by less are as fast as one another."""
UNTRIED = "how large a step fits was not looked for, as this one has many operators."
PLAIN, CHECKPOINTING = "plain", "checkpointing"
SELECTIVE, OURS = "selective", "ssdtrain"
FixedWay = tuple[Timeline, Mapping[str, Sequence[Order]]]


@dataclass(frozen=True, kw_only=True)
class TrainingMode:
    """One way to train."""

    name: str
    step_ms: float
    tokens_per_s: float
    """Of all GPUs; 0.0 for a user's model."""
    memory_bytes: int
    """The peak of one GPU, everything included."""
    fits: bool


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What ssdtrain's plan does in each step, on one GPU."""

    moved_bytes: int
    """To host memory, and back for backward."""
    again_bytes: int
    """Dropped, and computed again in backward."""
    host_bytes: int
    """Pinned host memory that this needs."""


@dataclass(frozen=True, kw_only=True)
class FitReport:
    """What `ssdtrain fits` prints. Bytes are of one GPU."""

    question: Question
    tokens: int
    """Of the step that was captured, on one GPU."""
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    """At the peak of plain training, next to the three above; with what libraries keep
    for good."""
    capacity_bytes: int
    """Of the device."""
    usable_bytes: int
    """Of these: the rest stays free, as in ssdtrain's plans."""
    ways: tuple[TrainingMode, ...]
    longest: dict[str, int]
    """The largest `Question.size` that fits, by way; empty: it does not matter, or was
    not looked for, as `caveats` say then."""
    traffic: Traffic | None
    """None: there is no plan, as plain training fits or nothing does."""
    host_wait_ms: float
    """For which the GPU waits in a plain step until kernels are launched."""
    gpus_of_host: int
    is_causal: bool
    """Whether it is a public model that predicts the next token."""
    caveats: tuple[str, ...]
    """What is priced otherwise than it runs, or left out."""
    sentence: str

    @property
    def is_bound_by_host(self) -> bool:
        """Whether another host would make another step of the plain one."""
        plain = self.way(PLAIN)
        return plain is not None and self.host_wait_ms > HOST_SHARE * plain.step_ms

    def way(self, name: str) -> TrainingMode | None:
        """Return a row of the table; None: it is not there."""
        return next((way for way in self.ways if way.name == name), None)


def fits(question: Question) -> FitReport:
    """Answer the question. Raises ConfigError: the model or the device is not known, or
    weights, gradients and optimizer alone are more than the device holds."""
    device = load_device(question.gpu)
    capacity = int(device.spec.memory_bytes)
    shape = None
    if not question.is_own:
        shape = shape_of(question.model, question.train, question.loss)
    captured = captured_step(question, shape, device, question.size)
    usable = int((1 - DEVICE_RESERVE) * capacity)
    states = captured.profile.base_bytes
    if captured.weights + captured.gradients + captured.optimizer > usable:
        raise ConfigError(_too_large(question, captured, usable))
    ways, traffic = _ways(captured, capacity, usable)
    peaks = {name: peak for name, (_, peak) in ways.items()}
    tokens = 0 if question.is_own else question.gpus * question.tokens
    rows = tuple(
        TrainingMode(
            name=name,
            step_ms=ms,
            tokens_per_s=tokens / ms * 1e3,
            memory_bytes=peak,
            fits=peak <= usable,
        )
        for name, (ms, peak) in ways.items()
    )
    many = captured.num_operators > MANY
    longest = {} if many else _longest(question, shape, captured, usable)
    if longest and peaks[OURS] <= usable:  # the plan needs less than the fixed ones
        longest[OURS] = max(longest[OURS], question.size)
    answer = FitReport(
        question=question,
        tokens=question.tokens,
        weight_bytes=captured.weights,
        gradient_bytes=captured.gradients,
        optimizer_bytes=captured.optimizer,
        activation_bytes=peaks[PLAIN] - states + device.context_bytes,
        capacity_bytes=capacity,
        usable_bytes=usable,
        ways=rows,
        longest=longest,
        traffic=traffic,
        host_wait_ms=_host_wait_ms(captured.profile),
        gpus_of_host=min(question.gpus, cluster_of(DEFAULT, device.spec).node),
        is_causal=shape is not None and shape.is_causal,
        caveats=(*captured.caveats, *([UNTRIED] if many else [])),
        sentence="",
    )
    return replace(answer, sentence=_sentence(answer))


def _too_large(question: Question, captured: Captured, usable: int) -> str:
    shards = question.gpus if question.fsdp else 1
    total = shards * (captured.weights + captured.gradients + captured.optimizer)
    gpus = max(2, question.gpus)
    while total > ROOM * gpus * usable:
        gpus *= 2
    lora = "" if question.train is Train.LORA else "--train lora, "
    return (
        f"{question.model} does not fit: weights {bytes_text(captured.weights)}, "
        f"gradients {bytes_text(captured.gradients)} and optimizer "
        f"{bytes_text(captured.optimizer)} are more than the {bytes_text(usable)} that "
        f"one {question.gpu} has for them, before any activation; try --gpus {gpus} "
        f"--fsdp, {lora}or a GPU with more memory."
    )


def priced_ways(captured: Captured) -> dict[str, tuple[float, int]]:
    """Return (ms, whole peak in bytes) of the ways that need no plan."""
    base, found = captured.profile.base_bytes, {}
    for name, (timeline, orders) in fixed_ways(captured):
        outcome = Simulation(timeline, orders).run()
        ms = _with_links(captured, outcome.step_ms)
        found[name] = ms, base + outcome.peak_bytes
    return found


def fixed_ways(captured: Captured) -> Iterator[tuple[str, FixedWay]]:
    """Return the ways that need no plan, as they are simulated."""
    profile = captured.profile
    some = whole = Timeline(profile)
    if captured.stored:
        some = Timeline(selective(profile, captured.stored))
    asked = {PLAIN: (whole, "keep-all"), CHECKPOINTING: (whole, "regions")}
    for name, (timeline, wanted) in (asked | {SELECTIVE: (some, "regions")}).items():
        for policy in fixed_policies(timeline):
            if policy.name == wanted:
                orders = schedule(timeline, policy.placements, policy.style)
                yield name, (timeline, orders)


def _host_wait_ms(profile: Profile) -> float:
    timeline = Timeline(profile)
    return Simulation(timeline, keep_all(timeline)).run().host_wait_ms


def _ways(
    captured: Captured, capacity: int, usable: int
) -> tuple[dict[str, tuple[float, int]], Traffic | None]:
    """Return (ms, whole peak in bytes) of each way, and what the plan does."""
    found = priced_ways(captured)
    if found[PLAIN][1] <= usable:
        return {**found, OURS: found[PLAIN]}, None
    try:
        ms, peak, traffic = planned(captured, capacity)
    except ConfigError:
        ms, _ = found.get(CHECKPOINTING, found[PLAIN])
        return {**found, OURS: (ms, _peaks(captured)[OURS])}, None
    return {**found, OURS: (ms, peak)}, traffic


def planned(captured: Captured, capacity: int) -> tuple[float, int, Traffic]:
    """Return ms, the whole peak in bytes and the traffic of ssdtrain's plan for a
    device of so many bytes. Raises ConfigError: no plan fits."""
    search_marks = SEARCHED_STEPS * len(captured.profile.marks)
    plan = choose(captured.profile, Goal(device_bytes=capacity), search_marks)
    if plan.prediction is None:
        raise ConfigError("a chosen plan carries a prediction")
    ms = _with_links(captured, plan.prediction.step_ms)
    peak = captured.profile.base_bytes + plan.prediction.peak_bytes
    by = plan.bytes_by_placement()

    def bytes_of(*placements: Placement) -> int:
        return sum(by.get(each.name.lower(), 0) for each in placements)

    return (
        ms,
        peak,
        Traffic(
            moved_bytes=bytes_of(Placement.OFFLOAD, Placement.OFFLOAD_SSD),
            again_bytes=bytes_of(Placement.RECOMPUTE, Placement.RERUN),
            host_bytes=plan.prediction.host_peak_bytes,
        ),
    )


def _with_links(captured: Captured, ms: float) -> float:
    return max(ms, captured.least_ms) + captured.apart_ms


def _peaks(captured: Captured) -> dict[str, int]:
    """Return the whole peak of plain training and checkpointing, and the least one of
    ssdtrain's fixed policies and of all regions again, most of whose inputs move: what
    leaves last would be back at once."""
    timeline, base = Timeline(captured.profile), captured.profile.base_bytes
    peaks = {}
    for policy in fixed_policies(timeline):
        if policy.name in ("keep-all", "regions") or "offload" in policy.name:
            orders = schedule(timeline, policy.placements, policy.style)
            peaks[policy.name] = base + simulate(timeline, orders).peak_bytes
    most = num_read(captured.profile)
    for num_moved in range(max(0, most - KEPT_LAST), most + 1):
        if (again := again_moving(timeline, num_moved)) is not None:
            peak = base + simulate(timeline, again).peak_bytes
            peaks[str(num_moved)] = peak
    found = {PLAIN: peaks["keep-all"], OURS: min(peaks.values())}
    return found | ({CHECKPOINTING: peaks["regions"]} if "regions" in peaks else {})


def _longest(
    question: Question, shape: Shape | None, captured: Captured, capacity: int
) -> dict[str, int]:
    """Return how many tokens, or how large a user's micro-batch, fit, by way; empty
    where the size changes nothing. Between two sizes a peak lies below the line from
    one to the other."""
    device, size = load_device(question.gpu), question.size
    more = (WIDER * size, 2 * size if shape is None else size // WIDER)
    tried = MANY // captured.num_operators
    sizes = sorted((size, *more[:tried]))
    peaks = {
        one: _peaks(
            captured if one == size else captured_step(question, shape, device, one)
        )
        for one in sizes
    }
    if peaks[sizes[0]] == peaks[sizes[-1]]:  # the user's function does not look at it
        return {}
    # Short steps may save nothing large enough to be run again.
    least = peaks[size].keys() & peaks[sizes[-1]].keys()
    names = [name for name in (PLAIN, CHECKPOINTING, OURS) if name in least]

    def most_of(name: str) -> int:
        known = {one: each[name] for one, each in peaks.items() if name in each}
        return _most(known, capacity)

    for _ in range(min(PROBES, tried - len(more))):
        farthest, largest = max(map(most_of, names)), max(peaks)
        if farthest <= largest:
            break
        farther = min(farthest, FARTHER * largest)
        peaks[farther] = _peaks(captured_step(question, shape, device, farther))
    found = {name: most_of(name) for name in names}
    if shape is None:
        return found
    return {name: most // CONTEXT * CONTEXT for name, most in found.items()}


def _most(peaks: dict[int, int], capacity: int) -> int:
    """Return the largest size that fits, on the lines between the peaks of some."""
    sizes = sorted(peaks)
    fitting = sum(peaks[one] <= capacity for one in sizes)
    at = min(max(fitting - 1, 0), len(sizes) - 2)
    low, high = sizes[at], sizes[at + 1]
    slope = max(1.0, (peaks[high] - peaks[low]) / (high - low))
    return max(0, int(low + (capacity - peaks[low]) / slope))


def _sentence(answer: FitReport) -> str:
    """Return what to do, in one sentence."""
    ours, plain = answer.way(OURS), answer.way(PLAIN)
    again = answer.way(CHECKPOINTING)
    if ours is None or plain is None:
        raise ConfigError("a table has plain training and ssdtrain")
    line = "put `session = ssdtrain.offload(model)` before your training loop"
    option = "--micro-batch" if answer.question.is_own else "--tokens"
    if plain.fits:
        most = answer.longest.get(PLAIN, 0)
        told = f", up to {option} {most}" if most else ""
        return f"Plain training fits{told}: no memory needs to be saved."
    if not ours.fits:
        most = answer.longest.get(OURS, 0)
        less = f"{option} {most}" if most else "a smaller step"
        if answer.is_causal and answer.question.loss is Loss.STOCK:
            less = f"--loss fused, {less}"
        return f"It does not fit; take more GPUs with --fsdp, or {less}."
    if again is None or not again.fits:
        loss = ""
        if answer.is_causal and answer.question.loss is Loss.STOCK:
            loss = " (with this loss; ask again with --loss fused)"
        return f"Only ssdtrain fits{loss}: {line}."
    gain = again.step_ms / ours.step_ms - 1
    if gain < ALIKE:
        return "Checkpointing fits, and ssdtrain would be as fast; either will do."
    return f"{100 * gain:.0f} % faster than checkpointing: {line}."
