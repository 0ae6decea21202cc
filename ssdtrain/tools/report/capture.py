"""What is asked, and the step that answers it, captured on the meta device."""

from dataclasses import dataclass, replace

import torch

from ssdtrain.errors import ConfigError
from ssdtrain.plan.profile import Phase, Profile
from ssdtrain.regions.find import find_regions
from ssdtrain.tools.foresight.cluster import DEFAULT, cluster_of
from ssdtrain.tools.foresight.collectives import Collective
from ssdtrain.tools.foresight.device import DeviceCosts
from ssdtrain.tools.foresight.ranks import GATHERED_UNITS
from ssdtrain.tools.foresight.recorder import STATES
from ssdtrain.tools.foresight.spec import links_of
from ssdtrain.tools.report.build_public import (
    Loss,
    Shape,
    Train,
    public_subject,
    user_subject,
)
from ssdtrain.tools.report.deeper import Repeated, calls_of, deeper
from ssdtrain.tools.report.estimate import Estimated, estimate, num_bytes_of
from ssdtrain.tools.report.selective import StoredResult
from ssdtrain.tools.report.subject import Subject

OPTIMIZER = "adamw"


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked."""

    model: str
    """A short name, a config.json, an id of the local cache, or FILE.py:FUNCTION."""
    train: Train = Train.FULL
    tokens: int = 8192
    """Of one forward and backward on each GPU; not for FILE.py:FUNCTION."""
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
    stored: tuple[StoredResult, ...] = ()
    """By region call, what selective checkpointing stores."""
    num_operators: int = 0
    """That were captured."""
    caveats: tuple[str, ...] = ()
    """See `Estimated`."""


def captured_step(
    question: Question,
    shape: Shape | None,
    device: DeviceCosts,
    size: int,
    *,
    keeps_gradients: bool = False,
) -> Captured:
    """Return the profile of a step of so many tokens (or a user's micro-batch), of the
    sharded one where that is asked for."""
    keeps_gradients = keeps_gradients or question.fsdp
    if shape is None:
        with torch.device("meta"):
            subject = user_subject(question.model, question.train, size)
        made = _estimated(question, subject, device, keeps_gradients)
        return _captured(question, subject, made, device, keeps_gradients)
    total, period = shape.num_layers, shape.period
    few = total
    if total is not None and total > 2 * period + 1:
        few = period + 2 + (total - period - 2) % period
    small = shape if few is None or few == total else shape.with_layers(few)
    with torch.device("meta"):
        subject = public_subject(small, size)
        made = _estimated(question, subject, device, keeps_gradients)
        if small is shape or total is None or few is None:
            return _captured(question, subject, made, device, keeps_gradients)
        whole = public_subject(shape, size)
    modules = dict(subject.model.named_modules())
    [runs] = made.profile.regions.values()
    gradients = sum(_trained(modules[run.module]) for run in runs[1 : 1 + period])
    times = (total - few) // period
    by = Repeated(1, period, times, 0 if keeps_gradients else gradients)
    longer = _trained(whole.model) / max(1, _trained(subject.model))
    profile = deeper(made.profile, by)
    tail_ms, host_ms = profile.tail_ms * longer, profile.tail_host_ms * longer
    profile = replace(profile, tail_ms=tail_ms, tail_host_ms=host_ms)
    stored = tuple(made.stored[each] for each in calls_of(len(made.stored), by))
    made = made._replace(profile=profile, stored=stored)
    return _captured(question, whole, made, device, keeps_gradients)


def _estimated(
    question: Question, subject: Subject, device: DeviceCosts, keeps_gradients: bool
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


def _captured(
    question: Question,
    subject: Subject,
    made: Estimated,
    device: DeviceCosts,
    keeps_gradients: bool,
) -> Captured:
    """Count what is there before the step."""
    weights = sum(map(num_bytes_of, subject.model.parameters()))
    trained = _trained(subject.model)
    states = trained * STATES[question.optimizer]
    base = device.context_bytes + weights + states
    base += trained if keeps_gradients else 0
    rest = 0 if keeps_gradients else trained
    whole = Captured(
        profile=replace(made.profile, base_bytes=base, rest_bytes=rest),
        stored=made.stored,
        num_operators=made.num_operators,
        caveats=made.caveats,
        weights=weights,
        gradients=trained,
        optimizer=states,
    )
    return _sharded(question, whole, subject, device) if question.fsdp else whole


def _sharded(
    question: Question, found: Captured, subject: Subject, device: DeviceCosts
) -> Captured:
    """Return one rank's share under FSDP2, with whole layers and collectives next
    to."""
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
    more = {Phase.BACKWARD: gathered, Phase.FORWARD: root + 2 * largest}
    marks = tuple(
        replace(mark, other_bytes=mark.other_bytes + more[mark.phase])
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
    context = device.context_bytes
    base, tail = context + (profile.base_bytes - context) // number, profile.tail_ms
    return replace(
        found,
        profile=replace(profile, marks=marks, base_bytes=base, tail_ms=tail / number),
        weights=found.weights // number,
        gradients=found.gradients // number,
        optimizer=found.optimizer // number,
        apart_ms=ms(Collective.ALL_GATHER, root),
        least_ms=per_layer,
    )
