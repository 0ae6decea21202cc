"""Will it fit, how fast, and what is the best way: an answer before the run.

One capture of the step on the meta device gives a profile: what autograd saves, and
what each operator takes by the kernel models of foresight. Plain training, gradient
checkpointing and ssdtrain's plan are then prices of the same profile, by the simulator
that plans are made with.
"""

from dataclasses import dataclass, replace

import torch

from ssdtrain.errors import ConfigError
from ssdtrain.plan.baselines import fixed_policies
from ssdtrain.plan.choose import choose
from ssdtrain.plan.goal import Goal
from ssdtrain.plan.placement import Placement
from ssdtrain.plan.plan import Plan
from ssdtrain.plan.profile import Phase, Profile
from ssdtrain.plan.schedule import schedule
from ssdtrain.plan.simulate import simulate
from ssdtrain.plan.timeline import Timeline
from ssdtrain.quantities import bytes_text
from ssdtrain.regions.find import find_regions
from ssdtrain.tools.foresight.cluster import DEFAULT, cluster_of
from ssdtrain.tools.foresight.collectives import Collective
from ssdtrain.tools.foresight.device import Device, load_device
from ssdtrain.tools.foresight.ranks import GATHERED_UNITS
from ssdtrain.tools.foresight.recorder import STATES
from ssdtrain.tools.foresight.spec import links_of
from ssdtrain.tools.report.build_public import (
    Loss,
    Shape,
    Train,
    public_subject,
    shape_of,
    user_subject,
)
from ssdtrain.tools.report.deeper import Repeated, calls_of, deeper
from ssdtrain.tools.report.estimate import Estimated, estimate, num_bytes_of
from ssdtrain.tools.report.selective import Stored, selective
from ssdtrain.tools.report.subject import Subject

OPTIMIZER = "adamw"
SEARCH_MARKS = 400_000
"""Of the search for a plan: a second or two."""
WIDER = 4
"""The largest step that fits is looked for up to so many times the size asked for;
of tokens, also down to this part of them. Where it lies beyond, larger ones are tried.
"""
PROBES, FARTHER = 3, 16
"""Larger steps that are tried, each up to so many times the largest one before."""
ROOM = 0.75
"""Part of a device that weights, gradients and optimizer may take where a number of
GPUs is proposed."""
CONTEXT = 1024
"""Tokens in which the longest context is told."""
ALIKE = 0.02
"""Steps that differ by less are as fast as one another."""
PLAIN, CHECKPOINTING, SELECTIVE, OURS = (
    "plain",
    "checkpointing",
    "selective",
    "ssdtrain",
)


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked."""

    model: str
    """A short name, a config.json, an id of the local cache, or FILE.py:FUNCTION."""
    train: Train = Train.FULL
    tokens: int = 8192
    """Of one forward and backward on each GPU."""
    micro_batch: int = 1
    """What FILE.py:FUNCTION is given; for that alone."""
    gpu: str = "h100"
    gpus: int = 1
    fsdp: bool = False
    """Weights, gradients and optimizer are sharded over the GPUs."""
    loss: Loss = Loss.STOCK
    optimizer: str = OPTIMIZER

    def __post_init__(self) -> None:
        if self.fsdp and self.gpus < 2:
            raise ConfigError(f"fsdp expects gpus of 2 or more, got {self.gpus}")
        if self.optimizer not in STATES:
            known = ", ".join(sorted(STATES))
            raise ConfigError(f"optimizer expects one of {known}")

    @property
    def is_own(self) -> bool:
        """Whether a user's function builds the model."""
        return ".py:" in self.model

    @property
    def size(self) -> int:
        """Of a step: tokens, or what the user's function is given."""
        return self.micro_batch if self.is_own else self.tokens


@dataclass(frozen=True, kw_only=True)
class Way:
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
class Answer:
    """What `ssdtrain fits` prints. Bytes are of one GPU."""

    question: Question
    tokens: int
    """Of the step that was captured, on one GPU."""
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    """At the peak of plain training, beside the three above; with what libraries keep
    for good."""
    capacity_bytes: int
    """Of the device."""
    ways: tuple[Way, ...]
    longest: dict[str, int]
    """The largest `Question.size` that fits, by way; empty: it does not matter."""
    traffic: Traffic | None
    """None: there is no plan, because nothing fits."""
    is_causal: bool
    """Whether it is a public model that predicts the next token."""
    sentence: str

    def way(self, name: str) -> Way | None:
        """Return a row of the table; None: it is not there."""
        return next((way for way in self.ways if way.name == name), None)


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A profile, and the bytes of one GPU."""

    profile: Profile
    weights: int
    gradients: int
    optimizer: int
    apart_ms: float = 0.0
    """Communication that nothing hides."""
    least_ms: float = 0.0
    """All communication: no step is shorter."""
    stored: tuple[Stored, ...] = ()
    """By region call, what selective checkpointing stores."""


def fits(question: Question) -> Answer:
    """Answer the question.

    Raises:
        ConfigError: the model or the device is not known, or weights, gradients and
            optimizer alone are more than the device holds.
    """
    device = load_device(question.gpu)
    capacity = int(device.spec.memory_bytes)
    shape = None
    if not question.is_own:
        shape = shape_of(question.model, question.train, question.loss)
    captured = capture(question, shape, device, question.size)
    states = captured.profile.base_bytes
    if states > capacity:
        raise ConfigError(_too_large(question, captured, capacity))
    ways, traffic = _ways(captured, capacity)
    peaks = {name: peak for name, (_, peak) in ways.items()}
    rows = tuple(
        Way(
            name=name,
            step_ms=ms,
            tokens_per_s=0.0
            if question.is_own
            else question.gpus * question.tokens / ms * 1e3,
            memory_bytes=peak,
            fits=peak <= capacity,
        )
        for name, (ms, peak) in ways.items()
    )
    longest = _longest(question, shape, captured, capacity)
    if longest and peaks[OURS] <= capacity:  # the plan needs less than the fixed ones
        longest[OURS] = max(longest[OURS], question.size)
    answer = Answer(
        question=question,
        tokens=question.tokens,
        weight_bytes=captured.weights,
        gradient_bytes=captured.gradients,
        optimizer_bytes=captured.optimizer,
        activation_bytes=peaks[PLAIN] - states + device.context_bytes,
        capacity_bytes=capacity,
        ways=rows,
        longest=longest,
        traffic=traffic,
        is_causal=shape is not None and shape.is_causal,
        sentence="",
    )
    return replace(answer, sentence=_sentence(answer))


def _too_large(question: Question, captured: Captured, capacity: int) -> str:
    shards = question.gpus if question.fsdp else 1
    total = shards * (captured.weights + captured.gradients + captured.optimizer)
    gpus = max(2, question.gpus)
    while total > ROOM * gpus * capacity:
        gpus *= 2
    lora = "" if question.train is Train.LORA else "--train lora, "
    return (
        f"{question.model} does not fit: weights {bytes_text(captured.weights)}, "
        f"gradients {bytes_text(captured.gradients)} and optimizer "
        f"{bytes_text(captured.optimizer)} are more than the {bytes_text(capacity)} of "
        f"one {question.gpu}, before any activation; try --gpus {gpus} --fsdp, "
        f"{lora}or a GPU with more memory."
    )


def priced_ways(captured: Captured) -> dict[str, tuple[float, int]]:
    """Return (ms, whole peak in bytes) of the ways that need no plan."""
    base = captured.profile.base_bytes

    def priced(profile: Profile, name: str) -> tuple[float, int] | None:
        timeline = Timeline(profile)
        policies = {policy.name: policy for policy in fixed_policies(timeline)}
        if (policy := policies.get(name)) is None:
            return None
        orders = schedule(timeline, policy.placements, policy.style)
        found = simulate(timeline, orders)
        return _with_links(captured, found.step_ms), base + found.peak_bytes

    profile = captured.profile
    some = selective(profile, captured.stored) if captured.stored else profile
    found = {
        PLAIN: priced(profile, "keep-all"),
        CHECKPOINTING: priced(profile, "regions"),
        SELECTIVE: priced(some, "regions"),
    }
    return {name: each for name, each in found.items() if each is not None}


def _ways(
    captured: Captured, capacity: int
) -> tuple[dict[str, tuple[float, int]], Traffic | None]:
    """Return (ms, whole peak in bytes) of each way, and what the plan does."""
    found = priced_ways(captured)
    try:
        plan = choose(captured.profile, Goal(device_bytes=capacity), SEARCH_MARKS)
    except ConfigError:
        ms, _ = found.get(CHECKPOINTING, found[PLAIN])
        return {**found, OURS: (ms, _peaks(captured)[OURS])}, None
    if plan.prediction is None:
        raise ConfigError("a chosen plan carries a prediction")
    ms = _with_links(captured, plan.prediction.step_ms)
    peak = captured.profile.base_bytes + plan.prediction.peak_bytes
    return {**found, OURS: (ms, peak)}, _traffic(plan, plan.prediction.host_peak_bytes)


def _traffic(plan: Plan, host_bytes: int) -> Traffic:
    by = plan.bytes_by_placement()

    def bytes_of(*placements: Placement) -> int:
        return sum(by.get(each.name.lower(), 0) for each in placements)

    return Traffic(
        moved_bytes=bytes_of(Placement.OFFLOAD, Placement.OFFLOAD_SSD),
        again_bytes=bytes_of(Placement.RECOMPUTE, Placement.RERUN),
        host_bytes=host_bytes,
    )


def _with_links(captured: Captured, ms: float) -> float:
    return max(ms, captured.least_ms) + captured.apart_ms


def _peaks(captured: Captured) -> dict[str, int]:
    """Return the whole peak of plain training and checkpointing, and the least one of
    ssdtrain's fixed policies."""
    timeline, base = Timeline(captured.profile), captured.profile.base_bytes
    peaks = {
        policy.name: base
        + simulate(
            timeline, schedule(timeline, policy.placements, policy.style)
        ).peak_bytes
        for policy in fixed_policies(timeline)
        if policy.name in ("keep-all", "regions") or "offload" in policy.name
    }
    found = {PLAIN: peaks["keep-all"], OURS: min(peaks.values())}
    return found | ({CHECKPOINTING: peaks["regions"]} if "regions" in peaks else {})


def _longest(
    question: Question, shape: Shape | None, captured: Captured, capacity: int
) -> dict[str, int]:
    """Return how many tokens, or how large a micro-batch of a user's model, fit, by
    way; empty where the size changes nothing. A peak is the largest of sums that grow
    evenly with the size: between two sizes it lies below the line from one to the
    other."""
    device, size = load_device(question.gpu), question.size
    sizes = (size, 2 * size, WIDER * size)
    if shape is not None:
        sizes = (size // WIDER, size, WIDER * size)
    peaks = {
        one: _peaks(captured if one == size else capture(question, shape, device, one))
        for one in sizes
    }
    if peaks[sizes[0]] == peaks[sizes[-1]]:  # the user's function does not look at it
        return {}
    names = [name for name in (PLAIN, CHECKPOINTING, OURS) if name in peaks[size]]

    def most_of(name: str) -> int:
        return _most({one: each[name] for one, each in peaks.items()}, capacity)

    for _ in range(PROBES):
        farthest, largest = max(map(most_of, names)), max(peaks)
        if farthest <= largest:
            break
        farther = min(farthest, FARTHER * largest)
        peaks[farther] = _peaks(capture(question, shape, device, farther))
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


def capture(
    question: Question,
    shape: Shape | None,
    device: Device,
    size: int,
    *,
    keeps_gradients: bool = False,
) -> Captured:
    """Return the profile of a step, of the sharded one where that is asked for.

    size: tokens of a public model, micro-batch of a user's; see `Question.size`.
    """
    keeps_gradients = keeps_gradients or question.fsdp
    if shape is None:
        with torch.device("meta"):
            subject = user_subject(question.model, question.train, size)
        made = _estimated(question, subject, device, keeps_gradients)
        found = _sizes(question, subject.model, made, device, keeps_gradients)
        return _sharded(question, found, subject, device)
    total, period = shape.num_layers, shape.period
    few = total
    if total is not None and total > 2 * period + 1:
        few = period + 2 + (total - period - 2) % period
    small = shape if few is None or few == total else shape.with_layers(few)
    with torch.device("meta"):
        subject = public_subject(small, size)
        made = _estimated(question, subject, device, keeps_gradients)
        if small is shape or total is None or few is None:
            found = _sizes(question, subject.model, made, device, keeps_gradients)
            return _sharded(question, found, subject, device)
        whole = public_subject(shape, size)
    blocks = _block_bytes(subject, made.profile)
    gradients = sum(blocks[1 : 1 + period])
    times = (total - few) // period
    by = Repeated(1, period, times, 0 if keeps_gradients else gradients)
    longer = _trained(whole.model) / max(1, _trained(subject.model))
    profile = deeper(made.profile, by)
    profile = replace(
        profile,
        tail_ms=profile.tail_ms * longer,
        tail_host_ms=profile.tail_host_ms * longer,
    )
    stored = tuple(made.stored[each] for each in calls_of(len(made.stored), by))
    made = Estimated(profile, stored)
    found = _sizes(question, whole.model, made, device, keeps_gradients)
    return _sharded(question, found, whole, device)


def _estimated(
    question: Question, subject: Subject, device: Device, keeps_gradients: bool
) -> Estimated:
    with torch.device("meta"):
        return estimate(
            subject.model,
            subject.forward,
            links_of(device.spec),
            device,
            optimizer=question.optimizer,
            keeps_gradients=keeps_gradients,
        )


def _trained(model: torch.nn.Module) -> int:
    return sum(num_bytes_of(p) for p in model.parameters() if p.requires_grad)


def _block_bytes(subject: Subject, profile: Profile) -> list[int]:
    """Return the bytes of each region's gradients, in the order of the calls."""
    modules = dict(subject.model.named_modules())
    [runs] = profile.regions.values()
    return [_trained(modules[run.module]) for run in runs]


def _sizes(
    question: Question,
    model: torch.nn.Module,
    made: Estimated,
    device: Device,
    keeps_gradients: bool,
) -> Captured:
    """Count what is there before the step."""
    weights = sum(map(num_bytes_of, model.parameters()))
    trained = _trained(model)
    states = trained * STATES[question.optimizer]
    base = device.context_bytes + weights + states
    base += trained if keeps_gradients else 0
    rest = 0 if keeps_gradients else trained
    return Captured(
        profile=replace(made.profile, base_bytes=base, rest_bytes=rest),
        stored=made.stored,
        weights=weights,
        gradients=trained,
        optimizer=states,
    )


def _sharded(
    question: Question, found: Captured, subject: Subject, device: Device
) -> Captured:
    """Return one rank's share under FSDP2: weights, gradients and optimizer are
    divided, some layers are whole at a time, and collectives run beside compute."""
    if not question.fsdp:
        return found
    number = question.gpus
    modules = dict(subject.model.named_modules())
    paths = [region.path for region in find_regions(subject.model)]
    layers = [sum(map(num_bytes_of, modules[path].parameters())) for path in paths]
    root = found.weights - sum(layers)
    largest = max(layers, default=0)
    gathered = root + GATHERED_UNITS * largest
    if found.gradients:
        gathered += root + largest  # until they are reduced
    profile = found.profile
    marks = tuple(
        replace(mark, other_bytes=mark.other_bytes + gathered)
        if mark.phase is Phase.BACKWARD
        else replace(mark, other_bytes=mark.other_bytes + root + 2 * largest)
        for mark in profile.marks
    )
    fabric = cluster_of(DEFAULT, device.spec)

    def ms(kind: Collective, num_bytes: float) -> float:
        return fabric.microseconds(kind, num_bytes, number) / 1e3

    per_layer = sum(
        2 * ms(Collective.ALL_GATHER, size)
        + (ms(Collective.REDUCE_SCATTER, size) if found.gradients else 0.0)
        for size in layers
    )
    return replace(
        found,
        profile=replace(
            profile,
            marks=marks,
            base_bytes=device.context_bytes
            + (profile.base_bytes - device.context_bytes) // number,
            tail_ms=profile.tail_ms / number,
        ),
        weights=found.weights // number,
        gradients=found.gradients // number,
        optimizer=found.optimizer // number,
        apart_ms=ms(Collective.ALL_GATHER, root),
        least_ms=per_layer,
    )


def _sentence(answer: Answer) -> str:
    """Return what to do, in one sentence."""
    ours, plain = answer.way(OURS), answer.way(PLAIN)
    again = answer.way(CHECKPOINTING)
    if ours is None or plain is None:
        raise ConfigError("a table has plain training and ssdtrain")
    line = "put `session = ssdtrain.offload(model)` before your training loop"
    option = "--micro-batch" if answer.question.is_own else "--tokens"
    if plain.fits:
        most = answer.longest.get(PLAIN, 0)
        told = f"; ask again with more than {option} {most}" if most else ""
        return f"Plain training fits; no memory needs to be saved{told}."
    if not ours.fits:
        most = answer.longest.get(OURS)
        less = f"{option} {most}" if most else "a smaller step"
        return f"It does not fit; take more GPUs with --fsdp, or {less}."
    if again is None or not again.fits:
        return f"Only ssdtrain fits: {line}."
    gain = again.step_ms / ours.step_ms - 1
    if gain < ALIKE:
        return "Checkpointing fits, and ssdtrain would be as fast; either will do."
    return f"{100 * gain:.0f} % faster than checkpointing: {line}."
