"""Plans bound to addresses: the same launches, the same bits.

Run by test_kernels.py in a process of its own, with Triton's interpreter.
"""

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hector.emit.schedules import default_schedule
from hector.graph import HeteroGraph
from hector.ir.kernels import Plan
from hector.ir.node import Node, Op
from hector.nn import HGTConv, RGATConv, RGCNConv
from hector.nn.common import CompiledConv
from hector.passes.lifetimes import constants
from hector.passes.pipeline import ALL_SETTINGS, Optimizations
from hector.runtime import Backend, bound, executables, graph_arrays
from hector.runtime.bound import BoundPlan, TableLayout
from hector.runtime.device import DevicePlan, DeviceProgram, ValueTypes
from hector.runtime.launch import Launch
from hector.runtime.reference import Reference
from tests.hector.emit.oracle import random_graph
from tests.hector.layer_models import plans

if torch.cuda.is_available():
    pytest.skip(
        "the interpreter stands in for compiled kernels", allow_module_level=True
    )

NONE = Optimizations()
BOTH = Optimizations(compact=True, reorder=True)
SIZES = (6, 10, 3, 2)
"""Of a graph: the interpreter's time is that of its rows, and addresses have none."""


class Compiled:
    """What Triton returns of a launch, run by its interpreter: addresses become tensors
    again."""

    packed_metadata, function = "metadata", "function"

    def __init__(self, launch: Launch, like: list[Any]) -> None:
        self.launch, self.like = launch, like
        self.streams: list[object] = []

    def run(self, *given: Any) -> None:
        x, y, z, stream, function, metadata, *rest = given
        assert (function, metadata) == ("function", "metadata")
        assert rest[:3] == [None, None, None]
        self.streams.append(stream)
        args = [_tensor(a, b) for a, b in zip(rest[3:], self.like, strict=True)]
        self.launch.function[x, y, z](*args, **self.launch.options)


def _tensor(value: int, like: Any) -> Any:
    if not isinstance(like, Tensor):
        return value
    size = like.numel() * like.element_size()
    if not size:
        return torch.empty_like(like)
    memory = (ctypes.c_byte * size).from_address(value)
    return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)


def _given(plan: Plan, graph: HeteroGraph, types: ValueTypes) -> dict[Node, Tensor]:
    arrays, gen = graph_arrays(graph), torch.Generator().manual_seed(0)
    return {
        n: torch.rand(arrays.rows(n.domain), *n.shape, generator=gen).to(types.of(n))
        for n in plan.given
        if n.op not in (Op.GRAPH, Op.CONST)
    }


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every launch leaves a compiled kernel behind, as on a GPU."""
    seen = Launch.__call__

    def run(launch: Launch, aligned: bool) -> None:
        launch.compiled = Compiled(launch, list(launch.args))
        seen(launch, aligned)

    monkeypatch.setattr(Launch, "__call__", run)


@pytest.fixture(params=[("rgat", BOTH), ("hgt", NONE), ("rgcn", NONE)])
def made(
    request: pytest.FixtureRequest, launches: None
) -> Iterator[tuple[DevicePlan, dict[Node, Tensor], dict[Node, Tensor]]]:
    """A backward plan that ran once, what it was given and what it returned."""
    name, settings = request.param
    graph = random_graph(SIZES, "cpu")
    arrays, types = graph_arrays(graph), ValueTypes(torch.float32)
    plan = dict(plans(name, 8, settings))[f"{settings}/backward"]
    schedules = [default_schedule(k, arrays) for k in plan.kernels]
    device = DevicePlan(DeviceProgram(plan, types, schedules), arrays)
    given = _given(plan, graph, types)
    yield device, given, device.run(given)


def _same(device: DevicePlan, found: Any, want: dict[Node, Tensor]) -> None:
    assert found is not None
    for node in device.plan.outputs:
        assert torch.equal(found[node], want[node]), node


@pytest.mark.parametrize("shared_bytes", [0, 1 << 25])
def test_addresses_give_the_same_bits(
    made: Any, shared_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bound, "SHARED_BYTES", shared_bytes)
    device, given, want = made
    kept = device._kept
    ready = BoundPlan(device.steps, torch.device("cpu"), device._torch, kept)
    assert (ready.shared_bytes > 0) == (shared_bytes > 0)
    # Results of one call are not memory of the next one.
    first, second = ready.run(given), ready.run(given)
    _same(device, second, want)
    _same(device, first, want)
    inner = set(second or ()) - set(given) - set(device.plan.outputs)
    assert not inner


def test_another_device_has_a_function_of_its_own(made: Any) -> None:
    device, given, want = made
    layout = TableLayout()
    for place in (torch.device("cpu"), torch.device("cpu", 0)):
        own = device.steps, place, device._torch, device._kept
        _same(device, BoundPlan(*own, layout).run(given), want)
    assert len(layout.written) == 2


def test_a_plan_binds_itself_after_its_first_call(made: Any) -> None:
    device, given, want = made
    assert device.bound is not None
    _same(device, device.run(given), want)
    calls = [len(launch.compiled.streams) for launch in device.bound.launches]
    once = constants(device.plan)
    assert calls.count(0) == len(once) and set(calls) <= {0, 1}


def test_an_input_at_an_odd_address_takes_the_slow_way(made: Any) -> None:
    device, given, want = made
    moved = dict(given)
    read = {n for launch in device.bound.launches for _, n in launch.slots}
    node = next(n for n in given if n in read and given[n].numel())
    memory = torch.empty(given[node].numel() + 1)
    moved[node] = memory[1:].view(given[node].shape).copy_(given[node])
    assert moved[node].data_ptr() % 16
    assert device.bound.run(moved) is None
    _same(device, device.run(moved), want)


def test_what_depends_on_the_graph_alone_is_made_once() -> None:
    plan = dict(plans("rgcn", 8, NONE))[f"{NONE}/backward"]
    (once,) = constants(plan)
    assert repr(once).split(" = ")[1].startswith("div")
    for model in ("rgat", "hgt"):
        for _, other in plans(model, 8, BOTH):
            assert not constants(other)


@pytest.mark.parametrize("settings", ALL_SETTINGS, ids=str)
@pytest.mark.parametrize("model", ["rgat", "hgt"])
def test_contractions_are_einsums(model: str, settings: Optimizations) -> None:
    graph = random_graph(SIZES, "cpu")
    arrays, types = graph_arrays(graph), ValueTypes(torch.float32)
    oracle = Reference(arrays, torch.float32)
    for _, plan in plans(model, 8, settings):
        schedules = [default_schedule(k, arrays) for k in plan.kernels]
        device = DevicePlan(DeviceProgram(plan, types, schedules), arrays)
        for node, contraction in device._contractions.items():
            args = [torch.randn(arrays.rows(i.domain), *i.shape) for i in node.inputs]
            want = oracle.evaluate(node, args)
            torch.testing.assert_close(contraction(*args), want)


def _layer(kind: str, graph: HeteroGraph) -> CompiledConv:
    if kind == "hgt":
        names = list(graph.node_type_names)
        types = [(names[0], f"r{i}", names[0]) for i in range(graph.num_edge_types)]
        return HGTConv(8, 8, (names, types))
    return {"rgcn": RGCNConv, "rgat": RGATConv}[kind](8, 8, graph.num_edge_types)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *(("rgcn", torch.float32), ("rgat", torch.float16)),
        *(("hgt", torch.float32), ("hgt", torch.float16)),
    ],
)
def test_bound_layers_train_as_the_reference_does(
    kind: str, dtype: torch.dtype, launches: None
) -> None:
    graph = random_graph(SIZES, "cpu")
    torch.manual_seed(0)
    layer = _layer(kind, graph).to(dtype)
    oracle = _layer(kind, graph)
    oracle.load_state_dict(layer.state_dict())
    layer.set_options(backend=Backend.TRITON, optimizations=BOTH)
    # The interpreter multiplies the bits of bfloat16.
    tolerance = 1e-4 if dtype is torch.float32 else 3e-2
    for _ in range(2):  # the second call goes by addresses
        x = torch.randn(graph.num_nodes, 8).to(dtype).requires_grad_()
        y = x.detach().float().requires_grad_()
        for module, rows in ((layer, x), (oracle, y)):
            module.zero_grad()
            module(rows, graph).square().sum().backward()
        pairs = [(x.grad, y.grad)]
        pairs += [(p.grad, q.grad) for p, q in _parameters(layer, oracle)]
        for got, want in pairs:
            assert (got is None) == (want is None)
            if got is not None and want is not None:
                assert got.shape == want.shape and got.dtype is dtype
                scale = float(want.abs().max().clamp(min=1e-2))
                assert float((got.float() - want).abs().max()) <= tolerance * scale
    assert any(e._backward.runner._device.bound for e in executables(graph) if e.saved)


def _parameters(
    a: CompiledConv, b: CompiledConv
) -> Iterator[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
    yield from zip(a.parameters(), b.parameters(), strict=True)
