"""Recipes of what tensor parallel layers save: [Note: parts with recipes]."""

import json
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ssdtrain
from ssdtrain.cache.rows import RebuiltRow, WrappedRow
from ssdtrain.cache.tables import Tables
from ssdtrain.counters import Fallback
from ssdtrain.errors import InPlaceError
from ssdtrain.plan.placement import Placement
from ssdtrain.rebuild.graph import notes_of
from ssdtrain.transfer.device import CpuDevice
from tests.ranks import run_ranks
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.cache.plans import rebuilding
from tests.ssdtrain.cache.steps import train

if not dist.is_available():
    pytest.skip("no torch.distributed", allow_module_level=True)

from ssdtrain.cache.weights import COPIED_BYTES
from ssdtrain.cache.wrapped import as_made
from tests.ssdtrain.rebuild import wrapped_ranks
from tests.ssdtrain.rebuild.sharded import BATCH, NARROW, WIDE
from tests.ssdtrain.regions.plans import recipes_beside, some_again

WRITTEN = {"target": "host", "min_bytes": 1, "plan": "keep-all"}
FIRST_TABLE = 6
"""Steps before this one observe, or are watched to compile the plan."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two ranks said, of all cases."""
    out = tmp_path_factory.mktemp("wrapped")
    run_ranks([wrapped_ranks.__file__, out], out, 2)
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]


def is_right(name: str, found: dict[str, Any]) -> None:
    """Equal bits; and what must not be made again from some step on is not."""
    assert found["equal"] and found["finite"], name
    program, _, kind = name.partition("/")
    made = wrapped_ranks.PROGRAMS.get(program, (None, True))[1]
    first, *_, last = found["recipes"] if kind == "at_once" else found["recipes"][:-2]
    activation = "GeluBackward0" if program in ("gelu", "uneven") else "MulBackward0"
    assert first[activation] > 0, name
    assert (last.get(activation, 0) == first[activation]) == made, name
    if kind == "rebuilding":
        assert found["rows"] > 0, name


@pytest.mark.slow
@pytest.mark.parametrize("name", wrapped_ranks.cases(2))
def test_two_ranks(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        is_right(name, rank[name])


def test_no_recipe_reads_a_large_weight_that_is_gathered(
    ranks: list[dict[str, Any]],
) -> None:
    """It would read freed memory, or make FSDP2 gather it once more."""
    assert NARROW * WIDE * 4 <= COPIED_BYTES < WIDE * WIDE * 4
    for rank in ranks:
        for recipes in rank["sharded"]:
            # Blocks behind the first one rebuild one product from a copy of its weight;
            # the wide one is stored, and what reads it is made from that.
            assert recipes["MmBackward0"] == 2 * BATCH * WIDE * 4
            assert recipes["SiluBackward0"] == 6 * BATCH * WIDE * 4


@pytest.mark.parametrize("name", wrapped_ranks.cases(1))
def test_one_rank(mesh: Any, name: str) -> None:
    settings, how = wrapped_ranks.cases(1)[name]
    is_right(name, wrapped_ranks.compared(mesh, settings, **how))


def step(mesh: Any) -> Any:
    def loss_of(net: nn.Module, number: int) -> Tensor:
        loss: Tensor = net(wrapped_ranks.batch(number, mesh)).square().mean()
        return loss

    return loss_of


@pytest.mark.parametrize("others", [Placement.KEEP, Placement.OFFLOAD])
def test_rows_do_what_the_general_path_does(
    mesh: Any, others: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A settled step searches for nothing; marks and bytes are the same ones."""
    net = wrapped_ranks.Net(mesh, 64)
    found, searches, mark = [], [], 0
    with ssdtrain.offload(net, **wrapped_ranks.SETTINGS) as session:
        finder: Any = session.cache.recipes.finder  # type: ignore[attr-defined]
        find = finder.find

        def counted(*args: Any) -> Any:
            searches.append(args)
            return find(*args)

        finder.find = counted
        for number, _ in enumerate(train(net, step(mesh), FIRST_TABLE + 6)):
            if session.plan is not None and session.plan.policy != "rebuilding":
                session.follow(rebuilding(session, others))
            if number == FIRST_TABLE + 2:
                assert not searches
                (table,) = session.cache.tables.tables.values()
                rows = [row.inner for row in table.rows if type(row) is WrappedRow]
                assert RebuiltRow in map(type, rows)
                general = lambda own, cache, lane, plan, all: all  # noqa: E731
                monkeypatch.setattr(Tables, "hooks_of", general)
            searches.clear()
            before, mark = mark, session.cache.cursor.mark
            if number > FIRST_TABLE:
                found.append(mark - before)
        assert session.cache.is_idle and session.live_bytes == 0
        reports = session.steps[-5:]
    assert len(set(found)) == 1, found
    for name in ("num_records", "bytes_saved", "bytes_kept", "bytes_offloaded"):
        assert len({getattr(report, name) for report in reports}) == 1, name
    for name in ("bytes_recomputed", "bytes_reloaded", "saved_peak_bytes"):
        assert len({getattr(report, name) for report in reports}) == 1, name


def test_what_a_row_cannot_make_goes_the_general_way_as_a_wrapper(mesh: Any) -> None:
    """Its part has no name of its own, by which the plan would know it."""
    how = {"between": wrapped_ranks.by_an_operator}
    found = wrapped_ranks.compared(mesh, wrapped_ranks.SETTINGS, **how)
    assert found["equal"] and found["rows"] > 0
    assert not any(found["fallbacks"][FIRST_TABLE:]), found["fallbacks"]


def test_no_recipe_finds_a_tensor_by_its_wrapper(mesh: Any) -> None:
    """It would not ask for the wrapper's version."""
    notes: list[dict[int, Any]] = []

    def read_behind_a_wrapper(made: Tensor, layer: Any) -> Any:
        wrapper = wrapped_ranks.unchanged(made, layer)
        squared = (wrapper * wrapper).to_local()
        notes.append(dict(notes_of(made.grad_fn).outputs))
        return squared + torch.nn.functional.silu(made) * made

    how = {"between": read_behind_a_wrapper, "first": read_behind_a_wrapper}
    found = wrapped_ranks.compared(mesh, wrapped_ranks.SETTINGS, **how)
    assert found["equal"] and found["rows"] > 0
    assert notes and not any(notes)


@pytest.mark.parametrize("others", [Placement.KEEP, Placement.OFFLOAD])
@pytest.mark.parametrize("num_again", range(wrapped_ranks.LAYERS + 1))
def test_layers_that_run_again_beside_recipes(
    mesh: Any, others: Placement, num_again: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: all layers run again in the observed step, which learns of what
    recipes could make in them."""
    num_steps, followed = FIRST_TABLE + 7, FIRST_TABLE + 2
    plain = list(train(wrapped_ranks.Net(mesh, 64), step(mesh), num_steps))
    monkeypatch.setattr(CpuDevice, "capacity_bytes", lambda device: 1)
    net = wrapped_ranks.Net(mesh, 64)
    settings = {**wrapped_ranks.SETTINGS, "max_overhead": 1.0}
    with ssdtrain.offload(net, **settings) as session:
        for number, found in enumerate(train(net, step(mesh), num_steps)):
            assert same_bits(local(found), local(plain[number])), number
            if number == followed:
                plan = some_again(session, recipes_beside(others), num_again)
                session.follow(plan)
        last = session.steps[-1]
    assert Fallback.PLAN_MISMATCH not in last.fallbacks
    assert bool(last.recipes.get("region")) == (num_again > 0)
    made = last.recipes.get("MulBackward0", 0)
    assert made == 4096 * (wrapped_ranks.LAYERS - num_again)


def local(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [wrapped_ranks.local(tensor) for tensor in tensors]


# -- behind the forward ---------------------------------------------------------------


class Behind(nn.Module):
    """Saves a wrapper of a product, and lends what a program may write to."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Parameter(torch.randn(8, 8))
        self.up = nn.Parameter(torch.randn(8, 8))
        self.mesh = mesh
        self.lent: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, Shard

        gate, up = x @ self.gate, x @ self.up
        made = torch.nn.functional.silu(gate) * up
        wrapper = DTensor.from_local(made, self.mesh, [Shard(0)], run_check=False)
        self.lent = {"gate": gate, "up": up, "made": made, "wrapper": wrapper}
        result: Tensor = (wrapper * wrapper).to_local()
        return result


@pytest.mark.parametrize("which", ["gate", "up", "made", "wrapper"])
def test_what_is_written_to_before_backward_is_noticed(mesh: Any, which: str) -> None:
    """`made` by us alone: autograd has saved the wrapper."""
    net = Behind(mesh)
    with ssdtrain.offload(net, **WRITTEN) as session:
        net(torch.randn(8, 8)).sum().backward()
        assert session.steps[-1].recipes["MulBackward0"] > 0
        loss = net(torch.randn(8, 8)).sum()
        with torch.no_grad():
            net.lent[which].mul_(2)
        net.lent.clear()
        with pytest.raises(InPlaceError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("plan", ["keep-all", "offload-all"])
def test_backward_comes_twice(mesh: Any, plan: str) -> None:
    def gradients(settings: dict[str, Any] | None) -> list[Tensor]:
        net, found = Behind(mesh), []
        session = None if settings is None else ssdtrain.offload(net, **settings)
        torch.manual_seed(1)
        loss = net(torch.randn(8, 8)).sum()
        net.lent.clear()
        for again in (True, False):
            loss.backward(retain_graph=again)
            found += [p.grad.clone() for p in net.parameters() if p.grad is not None]
        if session is not None:
            assert session.last_step is not None
            assert session.last_step.recipes["MulBackward0"] > 0
            session.close()
        return found

    settings = {**WRITTEN, "plan": plan, "window_bytes": 1}
    assert same_bits(gradients(settings), gradients(None))


def test_gradients_of_gradients(mesh: Any) -> None:
    """As without us, whatever torch makes of them for DTensors."""

    def found(settings: dict[str, Any] | None) -> list[Any]:
        net = Behind(mesh)
        session = None if settings is None else ssdtrain.offload(net, **settings)
        torch.manual_seed(1)
        loss = net(torch.randn(8, 8)).square().sum()
        net.lent.clear()
        first = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
        sum(each.square().sum() for each in first).backward()  # type: ignore[union-attr]
        second = [p.grad for p in net.parameters()]
        if session is not None:
            session.close()
        assert all(each is not None for each in second)
        return [*(each.detach() for each in first), *second]

    settings = {**WRITTEN, "plan": "offload-all", "window_bytes": 1}
    assert same_bits(found(settings), found(None))


# -- one by one -----------------------------------------------------------------------


def test_a_part_of_other_bytes_has_no_recipe(mesh: Any) -> None:
    """A view of a DTensor may have moved them, and may have another dtype."""
    from torch.distributed.tensor import DTensor, Shard

    made = torch.randn(4, 4, requires_grad=True) * 2.0
    wrapper: Any = DTensor.from_local(made, mesh, [Shard(0)], run_check=False)
    part = wrapper._local_tensor.detach()
    assert as_made(part, wrapper)._base is made
    for other in (part.clone(), part.view(torch.int32)):
        assert as_made(other, wrapper) is other
    assert as_made(made, made) is made
