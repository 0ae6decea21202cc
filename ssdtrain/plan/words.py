"""A plan in plain words: what moves, what waits, and what to change next."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ssdtrain.plan.calibrate import NOTES
from ssdtrain.plan.placement import Placement
from ssdtrain.plan.plan import Plan, PredictedStall, Prediction, Wait
from ssdtrain.plan.profile import ESTIMATED, HostCosts, Profile
from ssdtrain.quantities import bytes_text

# A stall below this fraction of the step is not worth a change.
SMALL_STALL = 0.002
# Unforeseen waits above this fraction of the step are told before anything else.
MUCH_WAIT = 0.02
# So many times a plan's peak, free in the device's memory, hold a larger micro-batch.
MUCH_ROOM = 1.0
# A wait below this is not told of.
LEAST_MS = 0.05
# A link busy for more than this fraction of its half of the step is the limit.
BUSY = 0.85
HOST_ADVICE = (
    "the device waits for kernel launches; larger micro-batches, torch.compile or "
    "fewer, larger tensors (min_bytes) help."
)
NO_MODULE = "(no module)"


class ModuleRow(NamedTuple):
    """What happens to the tensors of one module, in bytes of one lane."""

    module: str
    num_items: int = 0
    kept_bytes: int = 0
    host_bytes: int = 0
    ssd_bytes: int = 0
    recomputed_bytes: int = 0
    recompute_ms: float = 0.0


COLUMNS = {
    Placement.KEEP: "kept_bytes",
    Placement.OFFLOAD: "host_bytes",
    Placement.OFFLOAD_SSD: "ssd_bytes",
}
"""Of a `ModuleRow`, by placement; `recomputed_bytes` of all others."""


def rows(profile: Profile, plan: Plan) -> list[ModuleRow]:
    """Return the placements of each module, in the order of the forward."""
    found: dict[str, ModuleRow] = {}
    for kind, items in profile.kinds.items():
        for item, order in zip(items, plan.orders[kind], strict=True):
            if not plan.saves(kind, order):
                continue
            name, placement = item.module or NO_MODULE, order.placement
            row = found.get(name, ModuleRow(name))
            rebuild_ms = item.recipe_ms if placement is Placement.RECOMPUTE else 0.0
            column = COLUMNS.get(placement, "recomputed_bytes")
            found[name] = row._replace(
                num_items=row.num_items + 1,
                recompute_ms=row.recompute_ms + rebuild_ms + item.made_ms,
                **{column: getattr(row, column) + item.num_bytes},
            )
    return list(found.values())


def explain(
    profile: Profile,
    plan: Plan,
    measured: Mapping[str, float] | None = None,
    *,
    waits_ms: Mapping[str, float] | None = None,
    host_wait_module: str = "",
    free_bytes: int | None = None,
) -> str:
    """Write the stall report.

    Args:
        profile: what was observed.
        plan: with its prediction.
        measured: `step_ms` and `stall_ms` of a step under the plan, where known.
        waits_ms: what the device waited for in a step, measured, by cause.
        host_wait_module: in which module's hooks it waited for the host most.
        free_bytes: device memory that no step has needed yet; None: unknown, as on a
            CPU.
    """
    prediction = plan.prediction
    if prediction is None:
        return "the plan carries no prediction; make it with `ssdtrain plan`."
    out, back = prediction.links["d2h"], prediction.links["h2d"]
    hidden_ms = max(0.0, out.busy_ms + back.busy_ms - prediction.stall_ms)
    lines = [
        f"Plan ({plan.policy}), as predicted: {_price(profile, prediction)}; peak "
        f"{bytes_text(prediction.peak_bytes)} instead of "
        f"{bytes_text(prediction.keep_peak_bytes)}.",
        f"Moved {bytes_text(out.num_bytes)} out and {bytes_text(back.num_bytes)} back, "
        f"hid {hidden_ms:.1f} ms of copies, stalled {prediction.stall_ms:.1f} ms"
        f"{_where(profile, prediction.stalls)}; rebuilt for "
        f"{prediction.recompute_ms:.1f} ms.",
        *_regions(profile, plan),
        *_waits(profile, plan, prediction),
    ]
    if out.num_bytes or back.num_bytes:
        lines.append(_slowdowns(profile))
    if measured is not None and measured.get("step_ms"):
        error = measured["step_ms"] / prediction.step_ms - 1
        off = f" ({100 * error:+.1f} % from the prediction)"
        lines.append(
            f"Measured, last step: {measured['step_ms']:.1f} ms"
            f"{off if _is_measured(profile) else ''}, stalled "
            f"{measured.get('stall_ms', 0.0):.1f} ms."
        )
    if waits_ms:
        told = ", ".join(f"{ms:.1f} ms for {cause}" for cause, ms in waits_ms.items())
        at = f" (the host most at {host_wait_module})" if host_wait_module else ""
        lines.append(f"Measured waits of the device: {told}{at}.")
    waited = _Waited.of(measured, waits_ms)
    lines.append("Next: " + _advice(profile, prediction, waited, free_bytes))
    return "\n".join(lines)


def _regions(profile: Profile, plan: Plan) -> list[str]:
    """Return how many regions run again, and what they take of attention."""
    num_runs = num_again = num_stored = stored_bytes = 0
    saved_ms = 0.0
    for kind, runs in profile.regions.items():
        again, orders = plan.regions_of(kind), plan.orders[kind]
        num_lanes = profile.lanes.count(kind)
        num_runs += len(runs)
        num_again += len(again)
        for part in (part for number in again for part in runs[number].parts):
            own = [orders[item] for item in part.items]
            if all(order.placement is not Placement.RERUN for order in own):
                num_stored += 1
                stored_bytes += sum(order.num_bytes for order in own)
                saved_ms += part.ms * num_lanes
    if not num_again:
        return []
    told = f"{num_again} of {num_runs} regions run again"
    if num_stored:
        told += (
            f"; {num_stored} attentions are stored ({bytes_text(stored_bytes)}), which "
            f"saves {saved_ms:.1f} ms of that"
        )
    return [f"{told}."]


def _price(profile: Profile, prediction: Prediction) -> str:
    """Return what a plan costs, and what that is counted from."""
    cost = f"{100 * prediction.overhead:+.1f} %"
    if _is_measured(profile):
        return (
            f"step {prediction.step_ms:.1f} ms, {cost} over a step without ssdtrain "
            f"({prediction.keep_ms:.1f} ms)"
        )
    if ESTIMATED in profile.notes:  # nothing was observed
        return (
            f"step {prediction.step_ms:.1f} ms, {cost} over keeping everything "
            f"({prediction.keep_ms:.1f} ms), by {profile.notes[ESTIMATED]}"
        )
    return (
        f"{cost} over keeping everything, by the times of the observed step "
        f"({prediction.keep_ms:.1f} ms, watching included), which rank plans and "
        "predict no step's time"
    )


def _is_measured(profile: Profile) -> bool:
    return any(note in profile.notes for note in NOTES)


def _slowdowns(profile: Profile) -> str:
    links = profile.links
    how = profile.notes.get("copy_slowdown", "assumed")
    return (
        f"While copies run, compute is slower by {100 * links.copy_slowdown:.2f} % a "
        f"direction ({how}); both directions slow one another by "
        f"{100 * links.duplex_slowdown:.1f} %."
    )


def _waits(profile: Profile, plan: Plan, prediction: Prediction) -> list[str]:
    """Return what compute waits for, by cause."""
    if plan.keeps_all:
        return ["Everything is kept; unless memory is limited, no hooks are installed."]
    lines = []
    causes = {cause: ms for cause, ms in prediction.waits.items() if ms >= LEAST_MS}
    if causes:
        told = ", ".join(f"{ms:.1f} ms for {cause}" for cause, ms in causes.items())
        lines.append(f"Compute waits {told}.")
    if prediction.host_wait_ms >= LEAST_MS:
        lines.append(
            f"It waited for the host {prediction.host_wait_ms:.1f} ms"
            f"{_where(profile, prediction.host_stalls)}: {_costs(profile.host_costs)}."
        )
    return lines


def _costs(costs: HostCosts) -> str:
    """Host time of each action, there and back."""
    named = (
        ("keeping", costs.keep),
        ("moving to the host", costs.host),
        ("moving to the SSD", costs.ssd),
        ("rebuilding", costs.rebuild),
    )
    told = [
        f"{name} {1e3 * (cost.pack_ms + cost.use_ms + cost.load_ms):.0f} us"
        for name, cost in named
        if cost.pack_ms > 0.0
    ]
    return "a tensor costs it, " + ", ".join(told)


def _where(profile: Profile, stalls: Sequence[PredictedStall]) -> str:
    if not stalls:
        return ""
    worst = stalls[0]
    item = profile.items_of(worst.lane)[worst.item]
    module = f" of module {item.module}" if item.module else ""
    return f" (most, {worst.ms:.1f} ms, at tensor {item.name}{module})"


class _Waited(NamedTuple):
    """What a step under the plan waited for."""

    ms: float
    step_ms: float
    """0: unknown."""
    cause: str
    """Of most of it."""

    @classmethod
    def of(
        cls, measured: Mapping[str, float] | None, waits_ms: Mapping[str, float] | None
    ) -> "_Waited | None":
        """Return it, if a step was measured."""
        found = dict(waits_ms or {})
        if measured is None and not found:
            return None
        values = measured or {}
        stall_ms = values.get("stall_ms", 0.0)
        cause = max(found, key=lambda name: found[name], default="a copy")
        ms = max(stall_ms, sum(found.values()))
        return cls(ms, values.get("step_ms", 0.0), cause)


def _told_waits(waited: _Waited | None) -> str:
    """Return what is to be said of waits where none were predicted."""
    if waited is None:
        return "no wait is predicted"
    if waited.ms < LEAST_MS:
        return "nothing waits"
    share = f", {100 * waited.ms / waited.step_ms:.1f} %" if waited.step_ms else ""
    return f"waits are short ({waited.ms:.1f} ms of the last step{share})"


def _unforeseen(profile: Profile, waited: _Waited) -> str:
    """Return the advice where more was waited for than the plan foresaw."""
    share = 100 * waited.ms / waited.step_ms
    told = (
        f"the last step waited {waited.ms:.1f} ms ({share:.1f} %), most for "
        f"{waited.cause}, and the plan foresaw next to none"
    )
    if waited.cause == Wait.HOST.value:
        return f"{told}: {HOST_ADVICE}"
    if profile.device.startswith("cpu"):
        return (
            f"{told}: on a CPU copies share the cores with compute; a GPU has copy "
            "engines."
        )
    return (
        f"{told}: the links were slower than when they were measured, or other work "
        "ran beside; `ssdtrain doctor` measures them again."
    )


def _advice(
    profile: Profile,
    prediction: Prediction,
    waited: _Waited | None,
    free_bytes: int | None,
) -> str:
    if prediction.host_wait_ms > max(
        prediction.stall_ms, SMALL_STALL * prediction.step_ms
    ):
        return f"the host is the limit: {HOST_ADVICE}"
    if prediction.stall_ms > SMALL_STALL * prediction.step_ms:
        link, what = _busiest(profile, prediction)
        return (
            f"the {link} is the limit ({what}); a faster link, a larger max_overhead "
            "or memory_budget, or more recipes would remove the wait."
        )
    if waited and waited.step_ms and waited.ms > MUCH_WAIT * waited.step_ms:
        return _unforeseen(profile, waited)
    link, what = _busiest(profile, prediction)
    if what and link:
        return (
            f"{_told_waits(waited)}, and the {link} is nearly full ({what}): a lower "
            "peak costs time now; raise max_overhead to buy it."
        )
    if not any(load.num_bytes for load in prediction.links.values()):
        return (
            f"nothing is moved: on a step of {prediction.step_ms:.1f} ms no copy pays "
            "within the goal. A larger max_overhead, a lower memory_budget or a "
            "larger micro-batch moves more."
        )
    rebuilding_ms = prediction.recompute_ms
    if (
        rebuilding_ms > SMALL_STALL * prediction.step_ms
        and rebuilding_ms > 0.5 * (prediction.step_ms - prediction.keep_ms) > 0
    ):
        return (
            "most of the overhead is rebuilding; recompute='off' gives it back at the "
            "cost of memory."
        )
    room = ""
    if free_bytes is not None and free_bytes > MUCH_ROOM * prediction.peak_bytes:
        room = f"; {bytes_text(free_bytes)} of device memory are free, so a larger "
        room += "micro-batch would fit"
    return f"{_told_waits(waited)} and the links have room{room}."


def _busiest(profile: Profile, prediction: Prediction) -> tuple[str, str]:
    """Return the link that is busy for nearly all of its half of the step."""
    forward = profile.forward_ms
    backward = max(profile.compute_ms - forward - profile.tail_ms, 1e-9)
    spans = {"d2h": forward, "h2d": backward, "ssd_write": forward + backward / 2}
    spans["ssd_read"] = backward
    names = {
        "d2h": "link from the GPU to host memory",
        "h2d": "link from host memory to the GPU",
        "ssd_write": "SSD's write bandwidth",
        "ssd_read": "SSD's read bandwidth",
    }
    parts = {
        name: load.busy_ms / max(spans[name], 1e-9)
        for name, load in prediction.links.items()
        if load.num_bytes
    }
    if not parts:
        return "", ""
    worst = max(parts, key=lambda name: parts[name])
    if parts[worst] < BUSY and prediction.stall_ms <= SMALL_STALL * prediction.step_ms:
        return "", ""
    share = min(1.0, parts[worst])
    return names[worst], f"busy for {100 * share:.0f} % of its half of the step"
