"""What a layer takes on one rank of a tensor-parallel group: time, memory, weights. A
rank's part is a decoder with fewer heads, a narrower feed-forward part and fewer words.
A few of its layers are captured and priced; repeated to two depths, they give a layer's
figures as the difference, and the ends (embedding, head, loss) as the rest.

Ways to keep activations: plain, checkpointing, selective checkpointing, and ssdtrain's
at some prices of a byte, at which every tensor stays, moves or is made again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ssdtrain.errors import ConfigError
from ssdtrain.plan.plan import Order
from ssdtrain.plan.prices import LEVELS, Priced, Prices
from ssdtrain.plan.profile import Item, Profile
from ssdtrain.plan.schedule import schedule
from ssdtrain.plan.simulate import Simulation
from ssdtrain.plan.timeline import Timeline
from ssdtrain.tools.foresight.device import DeviceCosts
from ssdtrain.tools.foresight.spec import links_of
from ssdtrain.tools.report.build_public import Shape, public_subject
from ssdtrain.tools.report.capture import Captured
from ssdtrain.tools.report.deeper import Repeated, calls_of, deeper, raised
from ssdtrain.tools.report.estimate import Estimated, estimate
from ssdtrain.tools.report.fits import PLAIN, fixed_ways
from ssdtrain.tools.search.experts import WIDE, dense_of, experts_of
from ssdtrain.tools.search.frameworks import StepMoment
from ssdtrain.tools.search.parallel_layout import Division

HEADS, GROUPS = "num_attention_heads", "num_key_value_heads"
WORDS, HIDDEN = "vocab_size", "hidden_size"
DECODERS = ("gemma2", "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")
"""Kinds of models whose tensor-parallel parts are known."""
OURS = "ssdtrain"
"""Begins the names of ways at a price of a byte."""
PRICES = tuple(LEVELS * part // 16 for part in (4, 6, 10, 11, 12, 14))
"""Levels of `Prices` that are ways; below the first everything stays."""
COLUMN_PARALLEL = ("q_proj", "gate_proj", "lm_head")
"""The first layers that read a norm's result: whole under sequence parallelism."""
RAISE = 1 << 50
"""Bytes by which a part of backward is raised above all others."""
REPEATS = (4, 12)
"""Times that the captured layers' period comes more than once."""


@dataclass(frozen=True, kw_only=True)
class PerLayer:
    """A figure of one layer, and of both ends together."""

    layer: float
    ends: float

    def of(self, layers: float) -> float:
        """Return the figure of so many layers and the ends."""
        return self.layer * layers + self.ends


@dataclass(frozen=True, kw_only=True)
class ActivationCost:
    """One way to keep the activations of a micro-batch."""

    milliseconds: PerLayer
    activation_bytes: Mapping[StepMoment, PerLayer]
    """On the device, at most."""
    moved_bytes: PerLayer = PerLayer(layer=0.0, ends=0.0)
    """That leave the device for host memory or the SSD, and come back."""


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """One micro-batch on one rank of a tensor-parallel group."""

    ways: Mapping[str, ActivationCost]
    """By name, such as "plain" and "checkpointing"."""
    parameters: PerLayer
    """A count, experts left out."""
    head: float
    """Parameters of an output embedding that is not tied to the input's."""

    def way_of(self, name: str, layers: int) -> str:
        """Return the way, or plain training where its lines, drawn through more layers,
        would move less than nothing or take less time than that."""
        way, plain_ms = self.ways[name], self.ways[PLAIN].milliseconds.of(layers)
        is_sound = way.milliseconds.of(layers) >= (1 - 1e-6) * plain_ms
        return name if is_sound and way.moved_bytes.of(layers) >= 0.0 else PLAIN


def tensor_degrees(shape: Shape, most: int) -> list[int]:
    """Return powers of two that divide heads, width and words. Raises ConfigError: the
    model is no decoder whose parts are known."""
    kind = shape.values["model_type"]
    if kind not in DECODERS:
        raise ConfigError(
            f"a search of layouts expects one of {', '.join(DECODERS)}, got {kind}"
        )
    values = dense_of(shape).values
    found, degree = [], 1
    while degree <= most:
        if all(values[name] % degree == 0 for name in (HEADS, WIDE, WORDS)):
            found.append(degree)
        degree *= 2
    return found


def sharded_shape(shape: Shape, degree: int) -> Shape:
    """Return one rank's part under tensor parallelism, of a dense model."""
    values: dict[str, Any] = dict(shape.values)
    values["head_dim"] = values.get("head_dim") or values[HIDDEN] // values[HEADS]
    groups = values.get(GROUPS, values[HEADS])
    values[GROUPS] = max(1, groups // degree)
    for name in (HEADS, WIDE, WORDS):
        values[name] //= degree
    return replace(shape, values=values)


def stage_costs(
    shape: Shape,
    degree: int,
    sequences: int,
    tokens: int,
    device: DeviceCosts,
    *,
    is_blocking: bool = False,
) -> dict[Division, StageCosts]:
    """Capture and price one rank's part under tensor parallelism of a `degree`, without
    and with sequence parallelism. `is_blocking`: the host waits for every kernel
    (CUDA_LAUNCH_BLOCKING)."""
    part = sharded_shape(dense_of(shape), degree)
    period = part.period
    model, found = _captured(part.with_layers(period + 2), sequences, tokens, device)
    if is_blocking:
        found = found._replace(profile=_blocking(found.profile))
    layer = sum(p.numel() for p in model.get_decoder().layers[0].parameters())
    count = sum(p.numel() for p in model.parameters())
    ends = count - (period + 2) * layer
    if (experts := experts_of(shape)) is not None:
        shared = experts.each / experts.number
        layer -= shared * experts.parameters(part.values[HIDDEN]) / degree
    parameters = PerLayer(layer=layer, ends=ends)
    whole = sequences * tokens * part.values[HIDDEN]
    costs = {}
    for division in Division if degree > 1 else (Division.NONE,):
        profile = found.profile
        if division is not Division.NONE:
            profile = _along_sequence(profile, whole, degree, division)
        ways = _lines(found._replace(profile=profile), period)
        costs[division] = StageCosts(
            ways=ways, parameters=parameters, head=untied_head(model)
        )
    return costs


def untied_head(model: Any) -> int:
    """Return the parameters of a model's output embedding; 0: none of its own."""
    head, words = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is words.weight:
        return 0
    return int(head.weight.numel())


def _blocking(profile: Profile) -> Profile:
    """Let the device wait while the host launches."""
    marks = tuple(replace(mark, ms=mark.ms + mark.host_ms) for mark in profile.marks)
    regions = {
        kind: tuple(replace(run, ms=run.ms + run.host_ms) for run in runs)
        for kind, runs in profile.regions.items()
    }
    return replace(profile, marks=marks, regions=regions)


def _along_sequence(
    profile: Profile, whole: int, degree: int, division: Division
) -> Profile:
    """Divide the items that have every element of the hidden state."""

    def divided(item: Item) -> Item:
        if item.num_bytes not in (2 * whole, 4 * whole):
            return item
        reader = item.module.rpartition(".")[2]
        if division is Division.INPUTS_WHOLE and reader in COLUMN_PARALLEL:
            return replace(item, recipe=None, inputs=())  # a collective made it
        return replace(item, num_bytes=item.num_bytes // degree)

    kinds = {kind: tuple(map(divided, items)) for kind, items in profile.kinds.items()}
    return replace(profile, kinds=kinds)


class WayFigures(NamedTuple):
    """One way at one depth."""

    ms: float
    moved_bytes: float
    activation_bytes: Mapping[StepMoment, float]


def _lines(found: Estimated, period: int) -> dict[str, ActivationCost]:
    """Return each way's figures by depth, as lines."""
    few, more = (_ways(found, Repeated(1, period, times, 0)) for times in REPEATS)
    shallow, deep = (period + 2 + period * times for times in REPEATS)

    def line(first: float, second: float) -> PerLayer:
        layer = (second - first) / (deep - shallow)
        return PerLayer(layer=layer, ends=first - shallow * layer)

    return {name: activation_cost(few[name], more[name], line) for name in few}


def activation_cost(
    few: WayFigures, more: WayFigures, line: Callable[[float, float], PerLayer]
) -> ActivationCost:
    """Return a way's figures as lines through two depths."""
    return ActivationCost(
        milliseconds=line(few.ms, more.ms),
        activation_bytes={
            moment: line(few.activation_bytes[moment], more.activation_bytes[moment])
            for moment in few.activation_bytes
        },
        moved_bytes=line(few.moved_bytes, more.moved_bytes),
    )


def _ways(found: Estimated, by: Repeated) -> dict[str, WayFigures]:
    """Return the figures of each way at one depth."""
    stored = tuple(found.stored[each] for each in calls_of(len(found.stored), by))
    return priced(found._replace(profile=deeper(found.profile, by), stored=stored))


def priced(found: Estimated) -> dict[str, WayFigures]:
    """Return the figures of each way."""
    profile = found.profile
    captured = Captured(
        profile=profile, weights=0, gradients=0, optimizer=0, stored=found.stored
    )
    ways = dict(fixed_ways(captured))
    timeline, _ = ways[PLAIN]
    prices = Prices(timeline, with_runs=True)
    for number, level in enumerate(PRICES, 1):
        placements = prices.placements(Priced(level, 0, 0))
        ways[f"{OURS} {number}"] = timeline, schedule(timeline, placements)
    later = {id(own): _later(own) for own, _ in ways.values()}
    return {
        name: _figures(own, later[id(own)], orders)
        for name, (own, orders) in ways.items()
    }


def _later(timeline: Timeline) -> dict[StepMoment, Timeline]:
    """Return timelines whose peak is at a moment of backward."""
    calls = {StepMoment.REDUCING: -2, StepMoment.LAST: 0}
    return {
        moment: Timeline(raised(timeline.profile, call, RAISE))
        for moment, call in calls.items()
    }


def _figures(
    timeline: Timeline,
    later: Mapping[StepMoment, Timeline],
    orders: Mapping[str, Sequence[Order]],
) -> WayFigures:
    outcome = Simulation(timeline, orders).run()
    held = {StepMoment.PEAK: float(outcome.peak_bytes)}
    for moment, raised_line in later.items():
        most = Simulation(raised_line, orders).run().peak_bytes
        held[moment] = float(most - RAISE)
    return WayFigures(outcome.step_ms, outcome.moved_bytes["d2h"], held)


def _captured(
    shape: Shape, sequences: int, tokens: int, device: DeviceCosts
) -> tuple[Any, Estimated]:
    with torch.device("meta"):
        model: Any = public_subject(shape, tokens).model
        words = torch.zeros((sequences, tokens), dtype=torch.long, device="meta")
        found = estimate(
            model,
            lambda: model(input_ids=words, labels=words).loss,
            links_of(device.spec),
            device,
            min_bytes=1,
        )
    return model, found
