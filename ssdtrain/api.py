"""The one door: `offload(model) -> Session`."""

import logging
import os
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ssdtrain.cache.bypass import Unhooked
from ssdtrain.cache.cache import TensorCache
from ssdtrain.cache.rebuilder import Rebuilder
from ssdtrain.cache.regions import Choice
from ssdtrain.cache.verify import open_verifier
from ssdtrain.cache.weights import Weights
from ssdtrain.cache.window import CacheLimits
from ssdtrain.config import (
    OffloadConfig,
    OffloadOptions,
    PlanChoice,
    Recompute,
    with_options,
)
from ssdtrain.counters import Counters, Fallback, StepReport, Trace, figures_of
from ssdtrain.engines import graphs, meshes, regions
from ssdtrain.engines.hints import Hints, Steps
from ssdtrain.engines.known import engine_of
from ssdtrain.engines.patch import Patches, weakly
from ssdtrain.engines.plain import Plain
from ssdtrain.engines.recognition import device_of
from ssdtrain.engines.watch import HELD, IdleMonitor
from ssdtrain.errors import ConfigError
from ssdtrain.numerics import settle
from ssdtrain.observe.planner import Planner
from ssdtrain.observe.room import WHOLE
from ssdtrain.plan import words
from ssdtrain.plan.goal import Goal
from ssdtrain.plan.placement import Placement
from ssdtrain.plan.plan import Plan, read_plan
from ssdtrain.plan.profile import Profile
from ssdtrain.plan.reasons import explain_step, why_nothing_left
from ssdtrain.plan.rule import KEEP_ALL, Rule
from ssdtrain.quantities import FIT, resolved
from ssdtrain.rebuild.finder import Finder
from ssdtrain.rebuild.modes import without_modes
from ssdtrain.rebuild.recipes import rules_of
from ssdtrain.regions.find import find_regions
from ssdtrain.storage.open import Opener, budget_bytes_per_s, rank_of, wear_of
from ssdtrain.storage.wear import WearReport
from ssdtrain.summary import NEXT, summary, why_it_stays
from ssdtrain.transfer.cuda import open_device
from ssdtrain.transfer.device import Device
from ssdtrain.transfer.direct import DirectOffloader
from ssdtrain.transfer.host_memory import (
    available_bytes,
    host_cap_bytes,
    total_bytes,
)
from ssdtrain.transfer.offloader import Drain, Meters, Offloader
from ssdtrain.transfer.pinned import PinnedPool

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger(__name__)


class Session:
    """Offloading in force on one model. Also a context manager."""

    def __init__(
        self,
        cache: TensorCache,
        steps: Steps,
        patches: Patches,
        trace: Trace,
        *,
        settings: OffloadConfig,
    ) -> None:
        self.hints = Hints(cache, steps)
        """Tell the cache what a schedule does next (DeepSpeed needs no call)."""
        self.trace = trace
        """The time line, when the configuration asked for one."""
        self.cache = cache
        """What becomes of each saved tensor. For tests and tools: its parts change from
        release to release."""
        self._steps = steps
        self._patches = patches
        self._settings = settings
        self._planner: Planner | None = None

    def __repr__(self) -> str:
        """What a notebook shows: it waits for nothing."""
        if self._planner is None:
            phase = f"plan={self._settings.plan!r}"
        else:
            phase = "following a plan" if self.is_settled else "observing"
        num_steps = self.cache.ledger.num_steps
        target = self._settings.target.value
        return f"<Session target={target!r}, {phase}, steps ended: {num_steps}>"

    @property
    def plan(self) -> Plan | None:
        """The plan in force, with its prediction; None while there is none."""
        planner = self._planner
        return self.cache.cursor.plan if planner is None else planner.plan

    def follow(self, plan: Plan | str, profile: Profile | None = None) -> None:
        """Follow a plan from the next step on.

        Args:
            plan: such as `session.plan`, edited, or the path of a saved one.
            profile: what the plan was made for, such as `session.profile` of the run
                that went before this one: the first steps need no observation, and
                steps that differ from it are planned for again (`plan="auto"`). None:
                plan no more.

        Raises:
            ConfigError: the file is not a plan.
        """
        found = read_plan(plan) if isinstance(plan, str) else plan
        if self._planner is None:
            self.cache.bypass = None  # `plan="keep-all"` may have had no hooks
            self.cache.cursor.plan = found
        elif profile is None:
            self._planner.follow(found)
        else:
            self._planner.begin_with(found, profile)

    @property
    def profile(self) -> Profile | None:
        """What the planner observed last; None before."""
        return None if self._planner is None else self._planner.profile

    def summary(self) -> str:
        """Three lines: memory saved, time paid, what to do next. Waits for the
        device."""
        return self._summary(self._explained())

    def explain(self) -> str:
        """The summary, and then the stall report in plain words: what moved, what
        waited at which tensor of which module. Waits for the device."""
        explained = self._explained()
        report = explained.partition(f"\n{NEXT}")[0]
        stays = []
        if self.plan is not None and self.profile is not None:
            stays = why_it_stays(self.profile, self.plan)
        return "\n".join([self._summary(explained), "", report, *stays])

    def _summary(self, explained: str) -> str:
        steps = self.steps
        return summary(steps, self.plan, self.profile, self._advice(steps, explained))

    def _advice(self, steps: list[StepReport], explained: str) -> str:
        """What to do next, the most pressing first."""
        if self._steps.monitor.told:
            return f"{self._steps.monitor.told}."
        if not self.is_settled:
            return "wait; the plan is still being made from the first steps."
        why = self.why_nothing_moves(steps[-1]) if steps else None
        if why is not None:
            return f"nothing was offloaded: {why}."
        return explained.partition(NEXT)[2]

    def _explained(self) -> str:
        last = self.last_step
        if self._steps.monitor.is_held:
            return f"{HELD[0].upper()}{HELD[1:]}."
        if self.plan is None or self.profile is None:
            return explain_step(
                None if last is None else last.as_dict(),
                self._settings.plan,
                self._settings.min_bytes,
                will_plan=not self.is_settled,
            )
        measured = None
        prediction = self.plan.prediction
        if last is not None and last.plan_error is not None and prediction is not None:
            step_ms = prediction.step_ms * (1 + last.plan_error)
            measured = {"step_ms": step_ms, "stall_ms": last.stall_ms}
        timed = [report for report in self.steps if "host" in report.waits_ms]
        waits = timed[-1:] or ([] if last is None else [last])
        return words.explain(
            self.profile,
            self.plan,
            measured,
            waits_ms=waits[0].waits_ms if waits else None,
            host_wait_module=waits[0].host_wait_module if waits else "",
            free_bytes=self._free_bytes(last),
        )

    def _free_bytes(self, step: StepReport | None) -> int | None:
        """Device memory that a step left over; None where nobody counts it."""
        device = self.cache.device
        capacity_bytes, level = device.capacity_bytes(), device.memory()
        if capacity_bytes is None or level is None:
            return None
        if step is None or step.allocated is None:
            return None
        used_bytes = level.allocated_bytes + step.allocated.forward_backward_bytes
        return max(0, capacity_bytes - used_bytes)

    @property
    def regions_refused(self) -> dict[str, str]:
        """Why repeated modules do not run again in backward, by path."""
        return dict(self.cache.regions.reasons)

    def why_nothing_moves(self, step: StepReport) -> str | None:
        """The reason that a step moved and rebuilt nothing; None while it may still
        come, and where `plan="keep-all"` asked for it."""
        setting = self._settings.plan
        if not self.is_settled or setting == PlanChoice.KEEP_ALL.value:
            return None
        if self.plan is not None and self.plan.keeps_all:
            return self._why_all_stays()
        totals = step.as_dict()
        return why_nothing_left(
            totals, step.fallbacks, setting, self._settings.min_bytes
        )

    def _why_all_stays(self) -> str:
        settings = self._settings
        if settings.memory_budget is not None:
            return f"everything fits into memory_budget={settings.memory_budget}"
        if settings.wanted_memory is not None:
            return (
                "everything fits into device memory; set memory_budget or max_overhead "
                "to need less of it"
            )
        return (
            "the plan keeps everything, because nothing that could move or be rebuilt "
            f"pays within max_overhead={settings.max_overhead}; set it higher, or "
            "memory_budget, to trade time for memory"
        )

    @property
    def latest(self) -> StepReport | None:
        """The newest report that is built already: nothing waits for it. A few steps
        after `last_step`; for logs."""
        return self._steps.latest

    @property
    def figures(self) -> dict[str, float]:
        """The figures of `latest` for a log, such as `accelerator.log(session.figures)`
        or `wandb.log`; none before it."""
        return figures_of(self.latest)

    @property
    def is_settled(self) -> bool:
        """Whether no warm-up and no observation is under way (`plan="auto"`), or none
        can be: three optimizer steps saved nothing as large as `min_bytes`.

        Of several ranks each has its own answer, and those that are told of plans say
        yes before the one that searches: let one rank decide for all."""
        if self._planner is None or self._planner.is_settled:
            return True
        return self._steps.monitor.sees_nothing

    @property
    def steps(self) -> list[StepReport]:
        """A report for every finished step, oldest first. Waits for the device."""
        return self._steps.reports()

    @property
    def can_capture(self) -> bool:
        """Whether a CUDA graph may be captured: what its plan is made of is observed.
        Earlier than `is_settled`, for a graph has a plan of its own."""
        if self._planner is None or self._steps.monitor.sees_nothing:
            return True
        return self._planner.may_capture()

    @property
    def graph_plan(self) -> Plan | None:
        """The plan of CUDA graphs that are captured now, with its prediction of a
        replay; None: they hold the plan in force. Searches for it (seconds) when asked
        first, as the first capture does."""
        return None if self._planner is None else self._planner.captured_plan()

    @property
    def segments(self) -> str:
        """What the caching allocator takes from the device: `whole` segments, as ever;
        `growing` ones, since memory was short; or `whole: ` and why, although it is."""
        return WHOLE if self._planner is None else self._planner.room.segments

    @property
    def live_bytes(self) -> int:
        """Bytes of saved tensors alive on the device now."""
        return self.cache.ledger.live_bytes

    @property
    def last_step(self) -> StepReport | None:
        """The report of the last finished step; None before the first."""
        reports = self.steps
        return reports[-1] if reports else None

    @property
    def path(self) -> str:
        """How bytes travel and why: the path taken, what it was measured against, and
        what is missing for the others."""
        return self.cache.offloader.path

    @property
    def graph_bytes(self) -> int:
        """Pinned host memory that captured CUDA graphs copy to, in bytes. It stays as
        long as the model."""
        copies = self.cache.captures.copies
        return 0 if copies is None else copies.used_bytes

    @property
    def wear(self) -> list[WearReport]:
        """Bytes written a day, budget and projected lifetime of every SSD in use."""
        return wear_of(self.cache.offloader.storage)

    def _plan(self, settings: OffloadConfig, engine: Plain) -> None:
        """Start to plan, or to follow a saved plan."""
        if settings.plan == PlanChoice.AUTO.value:
            device = self.cache.device
            goal = _goal_of(settings, device)
            if goal.device_bytes is not None and settings.wanted_memory != FIT:
                # What the allocator caches must not exceed the limit either.
                self._patches.also(device.limit_memory(goal.device_bytes))
            fall_back = self.cache.offloader.fall_back
            peers = engine.peers(lambda: fall_back(Fallback.PLANNED_ALONE))
            self._planner = Planner(
                self.cache,
                goal,
                peers,
                self.trace,
                engine.modules,
                _notes_of(settings),
                _first_regions(settings, self.cache.device),
            )
            hook = register_optimizer_step_pre_hook(
                weakly(self._planner.room.before_step)
            )
            self._patches.also(hook.remove)
            self._patches.also(self._planner.room.close)
            if goal.device_bytes is not None:
                hear = weakly(self._planner.start.hear_shortage)
                self._patches.also(device.hear_shortages(hear))
                self._planner.room.open()
            else:
                self._planner.room.open_for(engine.modules)
            self._steps.on_start = self._planner.step_starts
        elif settings.plan not in [choice.value for choice in PlanChoice]:
            self.cache.cursor.plan = read_plan(settings.plan)

    def close(self) -> None:
        """Restore everything that was patched, finish I/O, free memory and files.

        Idempotent. A backward that comes later and needs an offloaded tensor raises
        `SessionClosedError`.
        """
        self._patches.undo()
        if self._planner is not None:
            self._planner.close()
        self.cache.close()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()


@with_options
def offload(
    model: Any,
    config: OffloadConfig | None = None,
    **overrides: "Unpack[OffloadOptions]",
) -> Session:
    """Keep, offload or recompute what autograd saves in `model`'s forward.

    Sizes are bytes: 1048576, "8GB" (8 * 10^9) or "8GiB" (8 * 2^30). Fractions are 0.01
    or "1%". Gradients are bitwise equal under every setting.

    Args:
        model: an `nn.Module`, a DeepSpeed engine, or a list of model chunks.
        config: an `OffloadConfig`; the other arguments are its fields, and go on top.
        target: where tensors go: "host" (pinned memory), "ssd", or "tiered" (pinned
            memory first, then the SSD).
        directory: on the SSD; several paths on different SSDs share the bytes.
        device_memory: a limit for everything, weights and optimizer included, in bytes
            or percent; "fit": all that this process can get. Without any goal it is
            "fit": nothing changes if a step fits, else it is as fast as it can be.
        memory_budget: a limit for activations; the plan is the fastest one within
            it. "15%" is of the device's memory.
        max_overhead: the plan needs the least memory that may cost this fraction of the
            step's time, such as 0.02.
        min_bytes: smaller saved tensors stay on the device (1 MiB).
        recompute: "auto": what is cheap to compute is computed again instead of stored;
            "full": everything that can be; "regions": every repeated layer, as gradient
            checkpointing does; "off": nothing.
        regions: paths or class names of the modules that "regions" means, such as
            "model.layers.*"; empty: the members of lists of modules.
        plan: "auto", "offload-all", "keep-all", or the path of a saved plan.
        verify: "checksum" compares what comes back with what left, "shadow" byte by
            byte; "off".
        write_budget: most bytes written to each SSD a day; None: no limit.
        advanced: what only experiments set, such as {"io_threads": 8}; see
            `ssdtrain.config.AdvancedOptions`.

    Returns:
        A session; the training loop stays as it is. `print(session.summary())` says
        what it saves and costs.

    Raises:
        ConfigError: a setting is impossible here.
        AttachError: this model or framework version must be refused.
    """
    settings = OffloadConfig.merged(config, overrides)
    with without_modes():
        return _attach(model, settings)


def _attach(model: Any, settings: OffloadConfig) -> Session:
    """See `offload`."""
    engine = engine_of(model)
    modules = engine.modules
    device = open_device(device_of(modules))
    settle(device.torch_device)
    counters, trace = Counters(), Trace(settings.trace)
    patches = Patches()
    offloader = _open_offloader(
        settings, device, Meters(counters=counters, trace=trace)
    )
    limits = CacheLimits(
        min_bytes=settings.min_bytes,
        window_bytes=settings.window_bytes,
        prefetch_bytes=settings.prefetch_bytes,
    )
    cache = TensorCache(
        offloader,
        _rule_of(settings),
        limits,
        counters,
        loads_in_pieces=any(map(meshes.copies_tables, modules)),
    )
    cache.verifier = open_verifier(
        settings.verify, device.torch_device, modules, counters, settings.seed
    )
    monitor = IdleMonitor(
        [] if engine.moves_weights else modules,
        device.torch_device,
        lambda step: session.why_nothing_moves(step),
        lambda: cache.ledger.num_steps > 0 or cache.ledger.step_is_open,
        patches,
    )
    steps = Steps(cache, engine.progress(patches), monitor)
    session = Session(cache, steps, patches, trace, settings=settings)
    try:
        _keep_buffers(cache, modules, patches)
        meshes.keep_parts(modules, cache.keep_storage_of)
        if settings.recompute in (Recompute.AUTO, Recompute.FULL):
            _attach_recipes(cache, modules, patches, settings)
        if _may_run_again(settings):
            _attach_regions(cache, modules, patches, settings)
        if _does_nothing(settings) and not cache.verifier.checks_all:
            cache.bypass = Unhooked()
        session._plan(settings, engine)
        planner = session._planner
        cache.captures.attach(
            modules[0],
            lambda: session.can_capture,
            lambda: None if planner is None else planner.captured_plan(),
            hears_ends=graphs.hear_captures(cache.captures, patches),
        )
        engine.attach(session.hints, patches, cache.keep_storage_of)
    except BaseException:
        session.close()
        raise
    return session


def _keep_buffers(
    cache: TensorCache, modules: list[nn.Module], patches: Patches
) -> None:
    """Let buffers stay; those of a lazy module from its first forward on."""
    for module in modules:
        # By class: Megatron's DDP has a list of its own under this name.
        for buffer in nn.Module.buffers(module):
            if not is_lazy(buffer) and buffer.layout is torch.strided:
                cache.keep_storage_of(buffer)
        for part in nn.Module.modules(module):
            own = part._buffers.values()
            if any(each is not None and is_lazy(each) for each in own):
                _keep_later(cache, part, patches)


def _keep_later(cache: TensorCache, module: nn.Module, patches: Patches) -> None:
    def called(module: nn.Module, args: Any) -> None:
        hook.remove()
        for buffer in module._buffers.values():
            if buffer is not None:
                cache.keep_storage_of(buffer)

    # Behind the module's own hook, which makes its buffers.
    hook = module.register_forward_pre_hook(called)
    patches.also(hook.remove)


def _attach_recipes(
    cache: TensorCache,
    modules: list[nn.Module],
    patches: Patches,
    settings: OffloadConfig,
) -> None:
    # See [Note: matrix products] in rebuild/recipes.py.
    weighed = settings.recompute is Recompute.FULL or not _is_fixed(settings)
    finder = Finder(rules_of(weighed=weighed))
    weights = Weights()
    for module in modules:
        finder.attach(module, patches.set)
        weights.trust(module)
    hook = register_optimizer_step_pre_hook(weakly(weights.before_step))
    patches.also(hook.remove)
    finder.is_idle = cache.looks_for_no_recipe
    cache.recipes = Rebuilder(cache, finder, weights)


def _attach_regions(
    cache: TensorCache,
    modules: list[nn.Module],
    patches: Patches,
    settings: OffloadConfig,
) -> None:
    for module in modules:
        found = find_regions(module, settings.regions)
        if settings.regions and not found:
            raise ConfigError(
                f"regions={settings.regions!r} names no module of this "
                f"{type(module).__name__}; name paths such as 'model.layers.*' (see "
                "named_modules()) or classes."
            )
        regions.wrap_regions(module, found, cache.regions, patches)
    # torch's hook would keep a session alive that nobody closed.
    hook = register_optimizer_step_pre_hook(weakly(cache.regions.before_step))
    patches.also(hook.remove)
    cache.regions.choice = Choice.ALL if _is_fixed(settings) else Choice.PLANNED


def _is_fixed(settings: OffloadConfig) -> bool:
    """Whether every saved tensor goes the same way, and nothing is planned."""
    return settings.plan in (PlanChoice.KEEP_ALL.value, PlanChoice.OFFLOAD_ALL.value)


def _does_nothing(settings: OffloadConfig) -> bool:
    """Whether every saved tensor stays, and nothing is made again."""
    keeps = settings.plan == PlanChoice.KEEP_ALL.value
    return keeps and settings.recompute is Recompute.OFF


def _may_run_again(settings: OffloadConfig) -> bool:
    """Whether regions may run again: all of them, or those of a plan."""
    if settings.recompute is Recompute.AUTO:
        return not _is_fixed(settings)
    return settings.recompute is Recompute.REGIONS


def _first_regions(settings: OffloadConfig, device: Device) -> Choice:
    """Which regions run again while there is no plan."""
    limited = device.capacity_bytes() is not None
    if settings.recompute is Recompute.REGIONS:
        return Choice.ALL
    if settings.recompute is Recompute.AUTO and limited:
        return Choice.ALL
    return Choice.NONE


def _rule_of(settings: OffloadConfig) -> Rule:
    """For what no plan names."""
    if settings.plan == PlanChoice.KEEP_ALL.value:
        return KEEP_ALL
    if settings.plan in (PlanChoice.OFFLOAD_ALL.value, PlanChoice.AUTO.value):
        return Rule()
    return Rule(Placement.OFFLOAD_IF_IN_TIME)


def _goal_of(settings: OffloadConfig, device: Device) -> Goal:
    return Goal(
        max_overhead=settings.max_overhead or 0.0,
        memory_budget_bytes=resolved(
            settings.memory_budget, lambda: _memory_of(device.torch_device)
        ),
        device_bytes=_device_bytes(settings, device),
        ssd_bytes_per_s=_ssd_bytes_per_s(settings),
    )


def _device_bytes(settings: OffloadConfig, device: Device) -> int | None:
    """What `device_memory` asks for.

    Raises:
        ConfigError: the model alone takes more.
    """
    asked = settings.wanted_memory
    if asked == FIT:
        capacity_bytes = device.capacity_bytes()
        if capacity_bytes is None:
            return _memory_of(device.torch_device)
        return capacity_bytes
    limit = resolved(asked, lambda: _memory_of(device.torch_device))  # type: ignore[arg-type]
    memory = device.memory()
    if limit is not None and memory is not None and memory.allocated_bytes > limit:
        raise ConfigError(
            f"device_memory={limit} is less than what is allocated already "
            f"({memory.allocated_bytes} bytes: the model, for the most part); set more."
        )
    return limit


def _memory_of(device: torch.device) -> int:
    """All memory of the device; of the machine or its cgroup for the CPU."""
    if device.type != "cuda":
        return total_bytes()
    return int(torch.cuda.get_device_properties(device).total_memory)


def _ssd_bytes_per_s(settings: OffloadConfig) -> float | None:
    if settings.write_budget is None or not settings.target.behind.is_disk:
        return None
    rank = rank_of(os.environ)
    return budget_bytes_per_s(settings.directories, rank, settings.write_budget)


def _notes_of(settings: OffloadConfig) -> dict[str, str]:
    notes = {"target": settings.target.value, "recompute": settings.recompute.value}
    rate = _ssd_bytes_per_s(settings)
    if rate is not None:
        notes["write_budget"] = f"{rate / 1e6:.3f} MB/s of SSD writes for this rank"
    return notes


def _open_offloader(
    settings: OffloadConfig, device: Device, meters: Meters
) -> Offloader:
    behind = settings.target.behind
    opener: Opener = resolve_name(behind.opener)
    storage, direct, why = opener(
        settings, device.torch_device, meters.counters.fell_back
    )
    logger.info("ssdtrain: %s", why)
    drain = Drain.NEVER
    if storage is not None:
        drain = Drain.AT_ONCE if behind.is_staged else Drain.WHEN_FULL
    ranks = rank_of(os.environ).local_world_size
    asked = resolved(settings.host_bytes, lambda: available_bytes() // ranks)
    cap = host_cap_bytes(asked, settings.target, ranks)
    reserve = cap // 4 if storage is not None else 0
    pool = PinnedPool(device, cap, reserve)
    threads = settings.io_threads
    if storage is not None and direct:
        return DirectOffloader(device, pool, storage, drain, threads, meters, why)
    return Offloader(device, pool, storage, drain, threads, meters, why)
