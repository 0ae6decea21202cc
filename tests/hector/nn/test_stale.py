"""Layers whose tensors, attributes or parameters change between calls: each result is
that of a layer that never saw anything else."""

import copy
import gc
import io
import os
import subprocess
import sys
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hector.graph import HeteroGraph
from hector.nn import HGTConv, RGATConv, RGCNConv
from hector.nn.common import CompiledConv

NODES, EDGES, RELATIONS, WIDTH = 12, 30, 3, 4


def rows(seed: int = 0) -> Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(NODES, WIDTH, generator=gen, dtype=torch.float64)


def edges(seed: int) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    ends = torch.randint(NODES, (2, EDGES), generator=gen)
    return ends, torch.randint(RELATIONS, (EDGES,), generator=gen)


def rgcn() -> RGCNConv:
    torch.manual_seed(0)
    return RGCNConv(WIDTH, WIDTH, RELATIONS).double()


def rgat() -> RGATConv:
    torch.manual_seed(0)
    return RGATConv(WIDTH, WIDTH, RELATIONS, heads=2).double()


def fresh(conv: CompiledConv, *arguments: object) -> Tensor:
    """The result of a copy without a past."""
    clones = [a.clone() if isinstance(a, Tensor) else a for a in arguments]
    found: Tensor = copy.deepcopy(conv)(*clones)
    return found


@pytest.mark.parametrize("make", [rgcn, rgat])
def test_fresh_tensors_of_like_size(make: Callable[[], CompiledConv]) -> None:
    conv, x = make(), rows()
    for seed in range(60):
        ends, kinds = edges(seed)
        torch.testing.assert_close(conv(x, ends, kinds), fresh(conv, x, ends, kinds))
        del ends, kinds


def test_an_entry_ends_with_its_tensors() -> None:
    conv, x = rgcn(), rows()
    graphs: list[weakref.ref[HeteroGraph]] = []
    for seed in range(20):
        ends, kinds = edges(seed)
        conv(x, ends, kinds).sum().backward()
        found = conv.graph_of(ends, kinds, NODES, RELATIONS)
        graphs.append(weakref.ref(found))
        del ends, kinds, found
        assert len(conv._graphs) == 0
    alive = sum(g() is not None for g in graphs)
    assert alive == 0, "without looking for cycles"


def test_a_graph_is_made_once() -> None:
    conv, x = rgcn(), rows()
    ends, kinds = edges(0)
    conv(x, ends, kinds)
    found = conv.graph_of(ends, kinds, NODES, RELATIONS)
    conv(x, ends, kinds)
    assert conv.graph_of(ends, kinds, NODES, RELATIONS) is found


def in_place(ends: Tensor, kinds: Tensor) -> None:
    kinds.copy_((kinds + 1) % RELATIONS)


def ends_in_place(ends: Tensor, kinds: Tensor) -> None:
    ends[0, 0] = (ends[0, 0] + 1) % NODES


def by_data(ends: Tensor, kinds: Tensor) -> None:
    kinds.data.copy_((kinds + 1) % RELATIONS)


def by_numpy(ends: Tensor, kinds: Tensor) -> None:
    ends.numpy()[0] = ends.numpy()[0, ::-1].copy()


def exchanged(ends: Tensor, kinds: Tensor) -> None:
    """The same values elsewhere: sums of them are equal."""
    kinds.data.copy_(kinds.flip(0))


def other_memory(ends: Tensor, kinds: Tensor) -> None:
    kinds.data = (kinds + 1) % RELATIONS


def other_storage(ends: Tensor, kinds: Tensor) -> None:
    with torch.no_grad():
        kinds.set_(((kinds + 1) % RELATIONS).clone())


CHANGES = [
    in_place,
    ends_in_place,
    by_data,
    by_numpy,
    exchanged,
    other_memory,
    other_storage,
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("make", [rgcn, rgat])
def test_tensors_changed_between_calls(
    make: Callable[[], CompiledConv], change: Callable[[Tensor, Tensor], None]
) -> None:
    conv, x = make(), rows()
    ends, kinds = edges(1)
    before = conv(x, ends, kinds)
    change(ends, kinds)
    after = conv(x, ends, kinds)
    torch.testing.assert_close(after, fresh(conv, x, ends, kinds))
    assert not torch.allclose(before, after)


def test_inference_tensors() -> None:
    conv, x = rgcn(), rows()
    for seed in range(5):
        with torch.inference_mode():
            ends, kinds = edges(seed)
            torch.testing.assert_close(
                conv(x, ends, kinds), fresh(conv, x, ends, kinds)
            )
            kinds.copy_((kinds + 1) % RELATIONS)
            torch.testing.assert_close(
                conv(x, ends, kinds), fresh(conv, x, ends, kinds)
            )


def test_the_number_of_relations_is_part_of_a_graph() -> None:
    conv, x = rgcn(), rows()
    ends, kinds = edges(0)
    first = conv.graph_of(ends, kinds, NODES, RELATIONS)
    second = conv.graph_of(ends, kinds, NODES, RELATIONS + 1)
    assert (first.num_edge_types, second.num_edge_types) == (RELATIONS, RELATIONS + 1)
    del x


# Two node types and two relations between the same types.
R1, R2 = ("a", "r1", "a"), ("a", "r2", "a")


def hgt() -> HGTConv:
    torch.manual_seed(0)
    return HGTConv(WIDTH, WIDTH, (["a"], [R1, R2])).double()


def test_one_tensor_under_two_relations() -> None:
    conv, x = hgt(), {"a": rows()}
    ends = edges(0)[0]
    first, second = conv(x, {R1: ends})["a"], conv(x, {R2: ends})["a"]
    wanted = copy.deepcopy(conv)(x, {R2: ends.clone()})["a"]
    torch.testing.assert_close(second, wanted)
    assert not torch.allclose(first, second)


def test_fresh_tensors_of_many_relations() -> None:
    conv, x = hgt(), {"a": rows()}
    for seed in range(40):
        given = {R1: edges(seed)[0], R2: edges(seed + 100)[0]}
        wanted = copy.deepcopy(conv)(x, {r: e.clone() for r, e in given.items()})
        torch.testing.assert_close(conv(x, given)["a"], wanted["a"])


def by_fused_optimizer(conv: HGTConv) -> None:
    for p in conv.parameters():
        p.grad = torch.ones_like(p)
    torch.optim.AdamW(conv.parameters(), lr=0.1, fused=True).step()


def by_parameter_data(conv: HGTConv) -> None:
    for p in conv.parameters():
        p.data.mul_(1.5)


def by_assignment(conv: HGTConv) -> None:
    state = {k: v * 1.5 for k, v in conv.state_dict().items()}
    conv.load_state_dict(state, assign=True)


@pytest.mark.parametrize(
    "change", [by_fused_optimizer, by_parameter_data, by_assignment]
)
def test_parameters_changed_between_evaluations(
    change: Callable[[HGTConv], None],
) -> None:
    conv, x, given = hgt(), {"a": rows()}, {R1: edges(0)[0]}
    with torch.no_grad():
        before = conv(x, given)["a"].clone()
        change(conv)
        after = conv(x, given)["a"]
        wanted = copy.deepcopy(conv)(x, {R1: given[R1].clone()})["a"]
    torch.testing.assert_close(after, wanted)
    assert not torch.allclose(before, after)


@pytest.mark.parametrize(
    "make, name, value",
    [
        (rgcn, "aggr", "sum"),
        (rgat, "negative_slope", 0.5),
        (rgat, "attention_mechanism", "within-relation"),
    ],
)
def test_attributes_changed_between_calls(
    make: Callable[[], CompiledConv], name: str, value: object
) -> None:
    conv, x = make(), rows()
    ends, kinds = edges(0)
    before = conv(x, ends, kinds)
    setattr(conv, name, value)
    other = make()
    setattr(other, name, value)
    after = conv(x, ends, kinds)
    torch.testing.assert_close(after, other(x, ends.clone(), kinds.clone()))
    assert not torch.allclose(before, after)


def test_too_few_rows_are_refused() -> None:
    conv = rgcn()
    ends, kinds = edges(0)
    graph = HeteroGraph.from_pyg(ends, kinds, num_nodes=NODES, num_relations=RELATIONS)
    conv(rows(), graph)
    with pytest.raises(ValueError, match="expected feature with 12 rows"):
        conv(rows()[:-1], graph)


def test_a_used_layer_is_saved() -> None:
    conv, x = rgcn().set_optimization("both"), rows()
    ends, kinds = edges(0)
    wanted = conv(x, ends, kinds)
    file = io.BytesIO()
    torch.save(conv, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded(x, ends, kinds), wanted)


def test_a_layer_ends_with_its_last_reference() -> None:
    conv = rgcn()
    ends, kinds = edges(0)
    conv(rows(), ends, kinds)
    gone = weakref.ref(conv)
    del conv
    gc.collect()
    assert gone() is None


CHECK = """
import torch
from hector.runtime import watch_kernels
from hector.kept import StaleGraphError
from hector.runtime.watch import BLOCK, DeviceWatch
kinds = torch.arange(3 * BLOCK // 2) % 7
ends = torch.arange(10).view(2, 5)
watch = DeviceWatch([ends, kinds], watch_kernels)
out, wide = torch.ones(5, 3), torch.ones(2, dtype=torch.float16)
watch.check([out, wide])
assert watch.unchanged([ends, kinds]) and bool((out == 1).all())
kinds.numpy()[[0, 5]] = kinds.numpy()[[5, 0]]
watch.check([out, wide])
assert bool(out.isnan().all()) and bool(wide.isnan().all())
try:
    watch.unchanged([ends, kinds])
except StaleGraphError:
    print("raised")
assert not watch.unchanged([ends, kinds])
"""


def test_digests_on_a_device() -> None:
    """By Triton's interpreter: an exchange of two values is seen, and no result is
    left."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHECK],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "raised\n"
