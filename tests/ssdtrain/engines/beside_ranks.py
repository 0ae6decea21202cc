"""Two ranks whose plans are searched for beside training, as on GPUs; run by
`test_beside_ranks.py`.

Each rank says what every step was for, which plan it followed, and whether losses,
gradients and weights are those of training without ssdtrain.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ssdtrain
from ssdtrain.observe import planner, searching
from ssdtrain.observe.memorygoal import MemoryGoal
from ssdtrain.observe.observation import Observation
from ssdtrain.observe.planner import Planner
from ssdtrain.plan.goal import Goal
from ssdtrain.plan.profile import Profile
from ssdtrain.plan.search import Request, Search
from ssdtrain.transfer.device import CpuDevice
from tests.ranks import LONGEST_S, leave
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.engines.mesh_ranks import (
    Model,
    batch,
    digest,
    parallel,
    sharded,
    slow_down,
    whole,
)
from tests.ssdtrain.observe.searches import await_what_runs_beside

MOST_STEPS, STEPS_BEHIND = 300, 4
STEPS_BESIDE = 25
"""Then a search that has not ended is waited for: the machine may be busy."""
SLOW_MS = 5.0
COLD_S = 0.35
"""How much longer one rank takes behind an observed step: longer than ranks wait for
one that did not come."""


class Case:
    """A model, and what it is trained under."""

    def __init__(
        self,
        make: Callable[[DeviceMesh], nn.Module],
        late: int,
        *,
        is_limited: bool = False,
        over_bytes: int = 0,
        stays: bool = False,
        **settings: Any,
    ) -> None:
        self.make = make
        self.is_limited = is_limited
        """Whether device memory has an end."""
        self.over_bytes = over_bytes
        """By which that rank goes beyond its memory limit under one plan."""
        self.stays = stays
        """Whether no plan is better than the first, which is compared in any step."""
        self.late = late
        """The rank that is slower, and late behind an observed step."""
        self.settings = {
            "max_overhead": 0.01,
            "target": "host",
            "min_bytes": 0,
            **settings,
        }


def cases() -> dict[str, Case]:
    """By name."""
    again = {"recompute": "regions", "memory_budget_bytes": 6000}
    less = {"recompute": "regions", "memory_budget_bytes": 11000}
    return {
        "tp": Case(parallel, 1, max_overhead=1.0),
        "tp regions": Case(parallel, 0, **again),
        "tp regions late": Case(parallel, 1, **again),
        "tp tried": Case(parallel, 1, is_limited=True, memory_budget_bytes=11000),
        "tp stays": Case(
            parallel, 0, is_limited=True, stays=True, memory_budget_bytes=11000
        ),
        "fsdp2": Case(sharded(None, True), 0, max_overhead=1.0),
        "fsdp2 exceeded": Case(
            sharded(None, True), 1, over_bytes=1000, memory_budget_bytes=11000
        ),
        "fsdp2 kept": Case(sharded(None, False), 1, **less),
    }


def spread(case: Case, mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    model = case.make(mesh)
    assert isinstance(model, Model)
    return model


def one_step(model: nn.Module, optimizer: Any, step: int, rank: int) -> list[Tensor]:
    loss = model(batch(step, 0, rank, torch.device("cpu"))).float().square().mean()
    loss = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
    loss.backward()
    grads = [whole(p.grad) for p in model.parameters() if p.grad is not None]
    optimizer.step()
    optimizer.zero_grad()
    return [loss.detach().clone(), *grads]


def all_say(yes: bool) -> bool:
    said = torch.tensor([int(yes)])
    dist.all_reduce(said, dist.ReduceOp.MIN)
    return bool(said.item())


STARTED: list[Planner] = []
"""Whose step started last."""
SEARCHES: list[Search] = []
"""Of this rank."""


class Known(Search):
    """Can be waited for."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        SEARCHES.append(self)


@contextlib.contextmanager
def behind(late_s: float) -> Iterator[None]:
    """Be late behind an observed step; remember the planner."""
    observed, starts = Observation.end, Planner.step_starts

    def observing(self: Observation, **asked: Any) -> Any:
        time.sleep(late_s)
        return observed(self, **asked)

    def starting(self: Planner, num_steps: int) -> None:
        STARTED[:] = [self]
        starts(self, num_steps)

    setattr(Observation, "end", observing)  # noqa: B010
    setattr(Planner, "step_starts", starting)  # noqa: B010
    try:
        yield
    finally:
        setattr(Observation, "end", observed)  # noqa: B010
        setattr(Planner, "step_starts", starts)  # noqa: B010


@contextlib.contextmanager
def beyond(over_bytes: int) -> Iterator[None]:
    """Go beyond the memory limit by so much in all steps under the first plan."""
    told, plans = MemoryGoal.over_bytes, list[Any]()

    def telling(self: MemoryGoal, goal: Goal) -> int:
        told(self, goal)
        (planner,) = STARTED
        plans.append(planner.plan)
        return over_bytes if planner.plan is plans[0] else 0

    setattr(MemoryGoal, "over_bytes", telling)  # noqa: B010
    try:
        yield
    finally:
        setattr(MemoryGoal, "over_bytes", told)  # noqa: B010


@contextlib.contextmanager
def staying(stays: bool) -> Iterator[None]:
    """Take no plan that is found, and ask in each step whether to compare again."""
    with pytest.MonkeyPatch.context() as patch:
        if stays:
            patch.setattr(Planner, "_is_hopeless", lambda self, plan: True)
            patch.setattr(Planner, "_fewest_again", lambda self: None)
            patch.setattr(planner, "FIRST_LOOK", 1)
        yield


def train(case: Case, mesh: DeviceMesh, rank: int, place: int) -> dict[str, Any]:
    """Until all ranks have settled, and some steps more."""
    model, events, found = spread(case, mesh), [], []
    # Where memory has an end, regions run again before the first plan.
    most = 1 << 40 if case.is_limited else None
    setattr(CpuDevice, "capacity_bytes", lambda device: most)  # noqa: B010
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    late = rank == case.late
    slow_down(model, SLOW_MS * late)
    with (
        behind(COLD_S * late),
        beyond(late * case.over_bytes),
        staying(case.stays),
        ssdtrain.offload(model, **case.settings) as session,
    ):
        left = STEPS_BEHIND
        for step in range(MOST_STEPS):
            if step >= STEPS_BESIDE:
                await_what_runs_beside(SEARCHES, session)
            found += one_step(model, optimizer, step, place)
            (own,) = STARTED
            events.append((own.stage.name, own.num_plans, digest(session.plan)))
            left -= all_say(session.is_settled)
            if not left:
                break
        report, profile = session.last_step, session.profile
        plan = session.plan
    found += [whole(p) for p in model.parameters()]
    return {
        "events": events,
        "peak_bytes": plan.prediction.peak_bytes if plan and plan.prediction else 0,
        "communicates": profile is not None and profile.communicates,
        "fallbacks": {} if report is None else report.as_dict()["fallbacks"],
        "rerun": 0 if report is None else report.as_dict()["bytes_recomputed"],
        "equal": same_bits(found, plain(case, mesh, place, len(events))),
    }


def plain(case: Case, mesh: DeviceMesh, place: int, num_steps: int) -> list[Tensor]:
    model, found = spread(case, mesh), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(num_steps):
        found += one_step(model, optimizer, step, place)
    return found + [whole(p) for p in model.parameters()]


def fits_plain(memory: MemoryGoal, profile: Profile, skipped_bytes: int = 0) -> bool:
    """Whether a step without hooks fits: where memory is not limited."""
    return not memory.goal.goal.is_by_memory


def main(out: Path, names: list[str]) -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    CpuDevice.runs_beside = True
    setattr(searching, "Search", Known)  # noqa: B010
    setattr(MemoryGoal, "fits_plain", fits_plain)  # noqa: B010
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", timeout=timedelta(seconds=LONGEST_S))
    mesh = init_device_mesh("cpu", (2,))
    found = {}
    for name, case in cases().items():
        if not names or name in names:
            place = 0 if name.startswith("tp") else rank
            found[name] = train(case, mesh, rank, place)
            (out / f"rank{rank}.json").write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
