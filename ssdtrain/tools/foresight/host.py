"""Host time of every operator: a trace's means, less what the profiler added.

[Note: waits inside operators]
An operator's host time differs little from others'.
Where a step has it once or twice, a single wait in it (a kernel that is loaded) is all
of its mean: T2 to T4 beyond [Q1 - 1.5 IQR, Q3 + 1.5 IQR] of a phase become its median;
not T1, where Python runs. (tests/ssdtrain/tools/foresight/test_models.py)
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ssdtrain.errors import ConfigError
from ssdtrain.tools.foresight.overheads import HostOverheads, StepPhase, reach

# Steps of the grid on which the profiler's costs are sought.
GRID_STEPS = 41
LARGEST_EVENT_US = 4.0
VIEWS = tuple(
    f"aten::{name}"
    for name in ("t", "view", "transpose", "permute", "detach", "expand", "slice")
)
UNKNOWN_VIEW_US = 6.0
FIELDS = ("t1", "t2", "t3", "t4", "t5", "num_launches")


@dataclass(frozen=True, kw_only=True)
class Correction:
    """What the profiler adds."""

    event_us: float = 0.0
    """To each profiled event (operator or CUDA call)."""
    share: float = 1.0
    """Of what is left then, the part that is there without a profiler."""


class HostTable:
    """Host costs by phase and operator; phases' means where an operator is unknown."""

    def __init__(
        self,
        rows: Iterable[Mapping[str, Any]],
        correction: Correction | None = None,
        *,
        has_waits: bool = True,
    ) -> None:
        """`rows` as `overheads.summary` gives them, of one or several programs;
        `has_waits`: waits are taken out, which those of a file went through. Raises
        ConfigError: a row lacks a field."""
        self._rows = [dict(row) for row in rows]
        self._correction = correction or Correction()
        groups: dict[tuple[StepPhase, str], list[Mapping[str, Any]]] = {}
        try:
            for row in self._rows:
                groups.setdefault((StepPhase(row["phase"]), row["name"]), []).append(
                    row
                )
            costs = {
                key: _cost(group, self._correction) for key, group in groups.items()
            }
            self._costs = _without_waits(costs) if has_waits else costs
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"host times: a row is damaged ({type(error).__name__}: {error})"
            ) from error
        self._defaults = {
            phase: _mean_cost([c for (p, _), c in self._costs.items() if p is phase])
            for phase in StepPhase
        }

    def cost(self, phase: StepPhase, name: str) -> HostOverheads:
        """Of one operator. Another phase's where only that one is known."""
        for at in (phase, *(other for other in StepPhase if other is not phase)):
            found = self._costs.get((at, name))
            if found is not None:
                return found
        return self._defaults[phase]

    def knows(self, name: str) -> bool:
        """Whether the operator was seen in any phase."""
        return any((phase, name) in self._costs for phase in StepPhase)

    @cached_property
    def view_us(self) -> float:
        """What a view takes the host, gap included: Python's unit between machines."""
        found = [
            cost.t1 + cost.t5
            for (_, name), cost in self._costs.items()
            if name in VIEWS and not cost.num_launches
        ]
        return statistics.median(found) if found else UNKNOWN_VIEW_US

    def as_dict(self) -> dict[str, tuple[float, ...]]:
        """T1 to T5 and the number of launches by `phase operator`."""
        return {
            f"{phase.value} {name}": tuple(
                round(float(getattr(cost, field)), 2) for field in FIELDS
            )
            for (phase, name), cost in sorted(self._costs.items())
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Sequence[float]]) -> "HostTable":
        """Build a `HostTable` from what `as_dict` made. Raises ConfigError: a row lacks
        a number or names no phase."""
        rows = []
        for key, numbers in values.items():
            phase, _, name = key.partition(" ")
            if len(numbers) != len(FIELDS):
                raise ConfigError(
                    f"host times: {key!r} expects {len(FIELDS)} numbers, got {numbers}"
                )
            row = dict(zip(FIELDS, numbers, strict=True))
            head = {"phase": phase, "name": name, "count": 1, "num_events": 0}
            rows.append({**head, **row})
        return cls(rows, has_waits=False)


def _without_waits(
    costs: Mapping[tuple[StepPhase, str], HostOverheads],
) -> dict[tuple[StepPhase, str], HostOverheads]:
    """See [Note: waits inside operators]."""
    found = dict(costs)
    for phase in StepPhase:
        some = {k: c for k, c in costs.items() if k[0] is phase and c.num_launches}
        if len(some) < 4:
            continue
        rows = [(cost.t2, cost.t3, cost.t4) for cost in some.values()]
        cut = map(_cut_off, zip(*rows, strict=True))
        for key, t2, t3, t4 in zip(some, *cut, strict=True):
            found[key] = replace(some[key], t2=t2, t3=t3, t4=t4)
    return found


def _cut_off(values: Sequence[float]) -> list[float]:
    """The median in the place of every value that is too large."""
    _, most = reach(values)
    usual = statistics.median(values)
    return [usual if value > most else value for value in values]


def _cost(group: Sequence[Mapping[str, Any]], correction: Correction) -> HostOverheads:
    def mean(name: str) -> float:
        known = [(row[name], row["count"]) for row in group if row[name] is not None]
        total = sum(count for _, count in known)
        if not total:
            return 0.0
        return float(sum(value * count for value, count in known)) / float(total)

    launches = mean("num_launches")
    events = mean("num_events")
    # Half of an event's cost falls before its start and half behind its end; inner
    # events' lie wholly within.
    inner = max(0.0, events - 1.0) * correction.event_us
    half = correction.event_us / 2
    own = mean("t2") + mean("t3") if launches else mean("t5")
    # What is left without the profiler's part; at least a third.
    less = max(1 / 3, 1.0 - inner / own) if own > 0.0 else 1.0
    less *= correction.share
    return HostOverheads(
        t1=max(0.0, mean("t1") - 2 * half) * correction.share,
        t2=mean("t2") * less,
        t3=mean("t3") * less,
        t4=mean("t4") * correction.share,
        t5=mean("t5") * less,
        num_launches=round(launches),
    )


def _mean_cost(costs: Sequence[HostOverheads]) -> HostOverheads:
    if not costs:
        return HostOverheads(t1=4.0, t2=5.0, t3=2.0, t4=3.0, t5=2.0, num_launches=1)
    names = ("t1", "t2", "t3", "t4", "t5")
    means = {name: sum(getattr(c, name) for c in costs) / len(costs) for name in names}
    return HostOverheads(**means, num_launches=1)


def fit_correction(
    programs: Sequence[tuple[Sequence[Mapping[str, Any]], float]],
) -> Correction:
    """The profiler's costs under which programs' host times add up. `programs`: rows of
    a program whose step the host binds, and its microseconds without a profiler."""
    best, found = float("inf"), Correction()
    pooled = [row for rows, _ in programs for row in rows]
    for step in range(GRID_STEPS):
        event_us = LARGEST_EVENT_US * step / (GRID_STEPS - 1)
        table = HostTable(pooled, Correction(event_us=event_us))
        ratios = []
        for rows, us in programs:
            whole = sum(
                float(row["count"])
                * table.cost(StepPhase(row["phase"]), row["name"]).total
                for row in rows
            )
            ratios.append(us / max(1.0, whole))
        if not ratios:
            break
        share = sorted(ratios)[len(ratios) // 2]
        spread = sum(abs(ratio / share - 1.0) for ratio in ratios)
        if share <= 1.05 and spread < best:
            best, found = spread, Correction(event_us=event_us, share=share)
    return found
