"""FSDP2, tensor parallel and DDP on gloo: four ranks, each case with and without us."""

import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ssdtrain
from ssdtrain.counters import Fallback
from ssdtrain.engines import meshes
from ssdtrain.errors import AttachError, InPlaceError
from tests.ranks import run_ranks
from tests.ssdtrain.engines import mesh_ranks

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What all ranks said, of all cases."""
    out = tmp_path_factory.mktemp("meshes")
    run_ranks([mesh_ranks.__file__, out, "cpu"], out, 4)
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(4)]


def of_case(results: Results, name: str) -> Results:
    found = [rank[name] for rank in results if name in rank]
    assert found, name
    return found


NAMES = [f"{name}/{c}" for name, (_, cs) in mesh_ranks.cases().items() for c in cs]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_losses_gradients_and_weights_are_equal(results: Results, name: str) -> None:
    for rank in of_case(results, name):
        assert rank["equal"]
        assert rank["report"]["bytes_offloaded"] > 0
        assert Fallback.KEPT_UNSUPPORTED.value not in rank["report"]["fallbacks"]
        if name.endswith("/ssd"):
            assert rank["report"]["bytes_written"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in NAMES if n.endswith("/auto")])
def test_ranks_follow_one_plan(results: Results, name: str) -> None:
    """One of them is slower, or has fewer batches; none planned alone."""
    ranks = of_case(results, name)
    assert all(rank["plans"][2] for rank in ranks)
    length = min(len(rank["plans"]) for rank in ranks)
    assert len({tuple(rank["plans"][:length]) for rank in ranks}) == 1
    for rank in ranks:
        assert Fallback.PLANNED_ALONE.value not in rank["report"]["fallbacks"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp2 reshard fp32", "tp", "fsdp2 x tp", "ddp"])
def test_a_lane_stays_in_its_table(results: Results, kind: str) -> None:
    """The first step under a plan makes its table, and the next one follows it."""
    for rank in of_case(results, f"{kind}/auto"):
        assert rank["rows"][4] == rank["general"][3]
        assert rank["general"][4] == 0
        assert Fallback.PLAN_MISMATCH.value not in rank["report"]["fallbacks"]


@pytest.mark.slow
def test_what_regions_saved_in_wrappers_is_planned_for(results: Results) -> None:
    """All regions run again in the observed step; at the end none does."""
    for rank in of_case(results, "tp regions/regions"):
        assert rank["report"]["recipes"] == {}
        assert Fallback.PLAN_MISMATCH.value not in rank["report"]["fallbacks"]
        assert rank["general"][-1] == 0


@pytest.mark.slow
def test_a_rank_that_strays_alone_meets_the_others_collectives(
    results: Results,
) -> None:
    """Its regions run again as theirs do, collectives inside: all losses are equal."""
    for rank, found in enumerate(of_case(results, "tp regions/regions")):
        assert found["equal"]
        assert found["strays"] == [0] * 8 + [rank % 2, 0, 0, 0]


# -- one rank, in this process --------------------------------------------------------


class Twice(nn.Module):
    """Saves a DTensor, and may change it behind that."""

    def __init__(self, mesh: Any, *, change: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(torch.randn(8, 8), mesh))
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight
        z = y * y
        if self.change:
            with torch.no_grad():
                y.mul_(2)
        return z.sum()


@pytest.mark.parametrize("plan", ["offload-all", "keep-all"])
def test_a_changed_wrapper_is_noticed(
    mesh: Any, everything: dict[str, Any], plan: str
) -> None:
    """Its part's version says nothing: only the wrapper's does."""
    everything["plan"] = plan
    if plan == "keep-all":
        everything["recompute"] = "auto"  # else there are no hooks
    x = distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)])
    for change in (False, True):
        model = Twice(mesh, change=change)
        with ssdtrain.offload(model, **everything) as session:
            loss = model(x)
            if change:
                with pytest.raises((InPlaceError, RuntimeError), match="modified"):
                    loss.backward()
                continue
            loss.backward()
            assert isinstance(model.weight.grad, DTensor)
            report = session.last_step
            assert report is not None
            assert not report.fallbacks
            # The same bytes under two wrappers are one record.
            assert report.num_records == 2


def test_parts_of_parameters_never_move(mesh: Any, everything: dict[str, Any]) -> None:
    """A model may compute with `weight.to_local()`, which is no parameter."""

    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(distribute_tensor(torch.randn(8, 8), mesh))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.weight.to_local()).sum()

    model = Local()
    with ssdtrain.offload(model, **everything) as session:
        model(torch.randn(4, 8)).backward()
        assert session.last_step is not None
        assert session.last_step.bytes_offloaded == 4 * 8 * 4  # x alone


def test_who_waits_for_whom(mesh: Any) -> None:
    plain, spread = nn.Linear(4, 4), Twice(mesh, change=False)
    assert meshes.ranks_of([plain]) == set()
    assert meshes.ranks_of([plain, spread]) == {0}
    replicated = nn.parallel.DistributedDataParallel(plain)
    assert meshes.ranks_of([nn.Sequential(replicated)]) == {0}


def test_a_model_that_is_sharded_behind_offload_is_refused(
    mesh: Any, everything: dict[str, Any]
) -> None:
    """Its ranks would not know of one another."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    with ssdtrain.offload(model, **everything):
        for part in (model[0], model):
            fully_shard(part, mesh=mesh)
        with pytest.raises(AttachError, match="call offload\\(\\) after"):
            model(torch.randn(4, 8))
