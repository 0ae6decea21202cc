"""Trains one model plain and under imposed plans, and says how the two compare."""

import hashlib
import random
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

import ssdtrain
from ssdtrain.errors import (
    ActivationLostError,
    AttachError,
    ConfigError,
    InPlaceError,
    RegionError,
)
from ssdtrain.observe import links, trials
from ssdtrain.plan import search
from ssdtrain.plan.baselines import away
from ssdtrain.plan.choose import choose, options
from ssdtrain.plan.goal import Goal
from ssdtrain.plan.placement import AWAY_PLACEMENTS, Placement, Placements
from ssdtrain.plan.plan import Plan
from ssdtrain.plan.profile import Item, Profile
from ssdtrain.plan.schedule import Style, schedule
from ssdtrain.plan.simulate import simulate
from ssdtrain.plan.timeline import Timeline
from ssdtrain.rates import straight
from ssdtrain.storage.measure import Drive
from ssdtrain.transfer.device import CpuDevice
from tests.ssdtrain.graphs.surprises import random_plan

Made = tuple[nn.Module, dict[str, Any]]
"""A model and the inputs of its forward."""
Maker = Callable[[bool], Made]
"""Gives the same one at every call, with a cache of keys and values or without."""
STEPS_UNDER_PLAN = 10
MOST_STEPS = 24
"""The first ones warm up and are observed."""
DRIVE = Drive(straight(1e9), straight(2e9))
"""Of no machine: to measure one takes longer than the steps."""
MARKS = 20_000
"""How long the search under a small budget may take."""
LEAST_SHARE = 0.9
"""Of the eligible bytes, what moves or is made again where equality counts."""
REFUSALS = (AttachError, ConfigError, InPlaceError, RegionError, ActivationLostError)


# -- plans -----------------------------------------------------------------------------


def placed(profile: Profile, choice: Callable[[Timeline, Item], Placement]) -> Plan:
    """A plan with this placement for each item; what leaves is gone at once, also where
    that frees nothing: the schedule would keep what backward asks for first."""
    timeline = Timeline(profile)
    placements: Placements = {
        kind: [choice(timeline, item) for item in items]
        for kind, items in profile.kinds.items()
    }
    orders = {
        kind: tuple(
            replace(order, placement=wanted, release_after=1)
            if wanted in AWAY_PLACEMENTS and not order.release_after
            else order
            for order, wanted in zip(own, placements[kind], strict=True)
        )
        for kind, own in schedule(timeline, placements, Style(window_bytes=1)).items()
    }
    return Plan(orders=orders, policy="imposed")


def moved(timeline: Timeline, item: Item) -> Placement:
    """To host memory, or on to the SSD where there is one."""
    last = options(timeline, item)
    order = Placement.OFFLOAD_SSD, Placement.OFFLOAD, Placement.KEEP
    return next(each for each in order if each in last)


def rebuilt(timeline: Timeline, item: Item) -> Placement:
    """Made by its recipe; what has none moves."""
    if Placement.RECOMPUTE in options(timeline, item):
        return Placement.RECOMPUTE
    return moved(timeline, item)


def within_budget(profile: Profile) -> Plan:
    """The search's plan for a quarter of what lies between least and most memory."""
    timeline = Timeline(profile)
    every = {kind: [away(timeline)] * len(own) for kind, own in profile.kinds.items()}
    orders = schedule(timeline, every, Style(window_bytes=1))
    least = simulate(timeline, orders)
    most = least.keep_peak_bytes
    budget = least.peak_bytes + max(0, most - least.peak_bytes) // 4
    return choose(profile, Goal(memory_budget_bytes=budget), MARKS)


Imposed = Callable[[Profile, random.Random], Plan]


class Group(NamedTuple):
    """Variants that one session goes through, each for `STEPS_UNDER_PLAN`."""

    settings: dict[str, Any]
    """Of the session."""
    plans: dict[str, Imposed | None]
    """By variant; None: no plan, all of the session is this variant."""
    cached: bool
    """Whether a cache of keys and values is made: layers that get one do not run
    again."""


GROUPS = (
    Group(
        {"max_overhead": 0.01, "target": "host", "plan": "auto"},
        {
            "host": lambda profile, draw: placed(profile, moved),
            "budget": lambda profile, draw: within_budget(profile),
        },
        True,
    ),
    Group(
        {"max_overhead": 0.01, "target": "ssd", "plan": "auto"},
        {"ssd": lambda profile, draw: placed(profile, rebuilt), "random": random_plan},
        False,
    ),
    Group(
        {
            "target": "host",
            "plan": "offload-all",
            "recompute": "regions",
            "window_bytes": 1,
        },
        {"regions": None},
        False,
    ),
)


@contextmanager
def observed(make: Imposed | None, *, regions: bool) -> Iterator[None]:
    """The planner takes this plan instead of searching.

    regions: they run again while they are observed, as where memory has an end.
    """
    draw = random.Random(0)

    def chosen(profile: Profile, *rest: Any, **settings: Any) -> Plan:
        if make is None:
            raise ConfigError("nothing is planned for here")
        return make(profile, draw)

    with ExitStack() as stack:
        if regions:
            stack.enter_context(
                mock.patch.object(CpuDevice, "capacity_bytes", lambda device: 1)
            )
        drive = mock.patch.object(links, "probe_drive", lambda *args, **rest: DRIVE)
        stack.enter_context(drive)
        stack.enter_context(mock.patch.object(search, "choose", chosen))
        # However long its steps are.
        stack.enter_context(mock.patch.object(trials, "ERROR", float("inf")))
        yield


# -- training --------------------------------------------------------------------------


def losses(output: Any) -> Iterator[Tensor]:
    """Every result with a gradient, in order."""
    if isinstance(output, Tensor):
        if output.requires_grad and output.is_floating_point():
            yield output
    elif isinstance(output, dict):
        for each in output.values():
            yield from losses(each)
    elif isinstance(output, list | tuple):
        for each in output:
            yield from losses(each)
    elif hasattr(output, "__dataclass_fields__"):
        for name in output.__dataclass_fields__:
            yield from losses(getattr(output, name))


def loss_of(output: Any) -> Tensor:
    """Mean squares of everything that has a gradient, summed."""
    found = [each.float().square().mean() for each in losses(output)]
    if not found:
        raise NoLoss("no result of this model has a gradient")
    return torch.stack(found).sum()


class NoLoss(ValueError):
    """Nothing to train."""


def digest(tensors: Any) -> str:
    """Of all bytes."""
    found = hashlib.blake2b(digest_size=16)
    for each in tensors:
        if each is None:
            found.update(b"none")
            continue
        if each.layout is not torch.strided:
            each = each.to_dense()
        plain = each.detach().resolve_conj().resolve_neg().contiguous()
        found.update(plain.view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


class Run:
    """What came of training: digests of each step, and what moved."""

    def __init__(self) -> None:
        self.steps: list[dict[str, str]] = []
        self.ends: dict[str, int] = {}
        """Number of steps up to the end of each variant."""
        self.bytes: dict[str, dict[str, int]] = {}
        """What became of what was saved in the last step of each variant."""
        self.refused: list[str] = []
        """Why repeated modules do not run again."""
        self.error: Exception | None = None
        self.finite = True


class Training:
    """A model, its inputs and its optimizer."""

    def __init__(self, make: Maker, cached: bool) -> None:
        seed(0)
        self.model, self._inputs = make(cached)
        self.model.train()
        self._own = [p for p in self.model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.SGD(self._own, lr=0.01)

    def step(self, run: Run) -> None:
        """Another one, written down."""
        seed(len(run.steps) + 1)
        self._optimizer.zero_grad(set_to_none=True)
        loss = loss_of(self.model(**self._inputs))
        loss.backward()
        step = {"loss": digest([loss])}
        step["next random numbers"] = digest([torch.rand(1), random_numbers()])
        step["gradients"] = digest(p.grad for p in self.model.parameters())
        run.finite = run.finite and bool(torch.isfinite(loss))
        del loss
        nn.utils.clip_grad_norm_(self._own, 1.0)
        self._optimizer.step()
        state = [*self.model.parameters(), *self.model.buffers()]
        step["weights"] = digest(state)
        run.steps.append(step)


def plainly(make: Maker, cached: bool, num_steps: int) -> Run:
    """Train without ssdtrain."""
    run, training = Run(), Training(make, cached)
    while len(run.steps) < num_steps:
        training.step(run)
    return run


def under(group: Group, make: Maker, directory: str) -> Run:
    """Train under all plans of a group; an error ends it, and is kept."""
    run, draw = Run(), random.Random(1)
    plans = iter(group.plans.items())
    name, first = next(plans)
    settings = dict(group.settings)
    if settings["target"] != "host":
        settings["directory"] = directory
    with observed(first, regions=not group.cached):
        training = Training(make, group.cached)
        with ssdtrain.offload(training.model, min_bytes=1, **settings) as session:
            try:
                while first is not None and session.plan is None:
                    if len(run.steps) == MOST_STEPS:
                        return run
                    training.step(run)
                while True:
                    for _ in range(STEPS_UNDER_PLAN):
                        training.step(run)
                    run.ends[name] = len(run.steps)
                    run.bytes[name] = bytes_of(session)
                    name, other = next(plans, ("", None))
                    if other is None or session.profile is None:
                        break
                    session.follow(other(session.profile, draw))
            except Exception as error:
                run.error = error
            run.refused = sorted(set(session.regions_refused.values()))
    return run


def random_numbers() -> Tensor:
    """The next ones of Python's and NumPy's generators."""
    return torch.tensor([random.random(), float(np.random.rand())], dtype=torch.float64)


def bytes_of(session: ssdtrain.Session) -> dict[str, int]:
    """What became of what autograd saved in the last step.

    `held`: what the program itself holds, such as the batch. Moving it frees nothing.
    """
    last = session.steps[-1]
    profile = session.profile
    items = () if profile is None else profile.items_of(0)
    return {
        "held": sum(item.num_bytes for item in items if item.held),
        "saved": last.bytes_saved,
        "moved": last.bytes_offloaded,
        "rebuilt": last.bytes_recomputed,
        "regions": last.recipes.get("region", 0),
        "kept": last.bytes_kept,
    }


def verdict(
    make: Maker, directory: str, groups: Iterable[Group] = GROUPS
) -> dict[str, Any]:
    """How a model fares: what is said of each variant, and in one word of all."""
    found: dict[str, Any] = {}
    for group in groups:
        try:
            run = under(group, make, directory)
        except Exception as error:  # on the way into the session, or out of it
            run = Run()
            run.error = error
        try:
            plain = plainly(make, group.cached, max(1, len(run.steps) + 1))
        except Exception as error:
            return {"verdict": "plain fails", "why": said(error)}
        if not plain.finite:
            return {"verdict": "plain fails", "why": "the loss is not finite"}
        own = {name: compared(plain, run, name) for name in group.plans}
        if any(one["verdict"] == "different" for one in own.values()):
            again = plainly(make, group.cached, len(plain.steps))
            if again.steps != plain.steps:
                return {"verdict": "plain fails", "why": "two plain runs differ"}
        found |= own
        if run.refused:
            found[f"no region {'with' if group.cached else 'without'} cache"] = (
                run.refused
            )
    return {"verdict": overall(found), "variants": found}


def compared(plain: Run, run: Run, name: str) -> dict[str, Any]:
    """One variant beside the plain run."""
    found: dict[str, Any] = {}
    if name in run.bytes:
        found["bytes"] = run.bytes[name]
    end = run.ends.get(name, len(run.steps))
    for number, (ours, theirs) in enumerate(zip(run.steps, plain.steps, strict=False)):
        if ours != theirs and number < end:
            what = ", ".join(part for part in ours if ours[part] != theirs[part])
            why = f"step {number}: other {what}"
            return {"verdict": "different", "why": why, **found}
    if name in run.ends:
        return {"verdict": "equal", **found}
    error = run.error
    if error is None:
        why = f"no plan after {len(run.steps)} steps"
        return {"verdict": "no plan", "why": why, **found}
    what = f"step {len(run.steps)}: {said(error)}"
    if isinstance(error, REFUSALS):
        return {"verdict": "refused", "why": what}
    where = traceback.format_exception(error)[-6:]
    return {"verdict": "crash", "why": what, "where": where}


def said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:500]


WORST = ("different", "crash", "refused", "no plan", "equal")


def overall(found: dict[str, Any]) -> str:
    """The worst of all; `equal` counts where enough went away."""
    own = [one for one in found.values() if isinstance(one, dict)]
    words = {one["verdict"] for one in own}
    worst = next(word for word in WORST if word in words)
    if worst == "equal" and not any(map(is_moved, own)):
        return "unmoved"
    return worst


def is_moved(one: dict[str, Any]) -> bool:
    """Whether what autograd saved went away, or regions ran again."""
    sums = one["bytes"]
    eligible = sums["saved"] - sums["held"]
    away_bytes = sums["moved"] + sums["rebuilt"]
    return sums["regions"] > 0 or away_bytes >= LEAST_SHARE * eligible > 0
