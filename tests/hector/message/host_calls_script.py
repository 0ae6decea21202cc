"""Prints the Python calls of a training step of each layer: see test_host_calls.py."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from hector import HeteroGraph, message
from hector.graph_cache import state_of
from hector.message import edges, joined, layers, relation, sums
from hector.message import functions as fn
from hector.message import nn as dglnn
from hector.nn import HGTConv, RGATConv, RGCNConv
from hector.runtime import Backend, executable
from hector.runtime.launch import Launch
from hector.runtime.watch import DeviceWatch

NODES, EDGES, WIDTH, RELATIONS = 30, 100, 16, 4


def nothing(*_: Any, **__: Any) -> None:
    """Launch nothing."""


# It takes whatever it is given, and is no function of Python's.
KERNEL = SimpleNamespace(run="".format, function=1, packed_metadata="")


class Jit:
    """A kernel of Triton's, by grid."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *_, **__: KERNEL


def launched(launch: Launch, aligned: bool) -> None:
    launch.compiled = KERNEL


def as_on_a_gpu() -> None:
    """Take a GPU's ways for tensors of the host."""
    kernels = SimpleNamespace(digest=Jit(), compare=Jit())
    made = edges.Edges.__init__

    def of_edges(self: Any, given: Any, *args: Any) -> None:
        made(self, given, *args)
        self._states = tuple(map(state_of, given))
        if self.sampled:
            self._watch = None

    changes: list[tuple[Any, str, Any]] = [
        (executable, "compiles", lambda _: True),
        (Launch, "__call__", launched),
        (edges, "watch", lambda tensors: DeviceWatch(tensors, kernels)),
        (edges.Edges, "__init__", of_edges),
        *((module, "sum_rows", nothing) for module in (layers, sums)),
        (relation, "plain_sum", nothing),
        (joined, "ONE_BY_ONE", ()),
    ]
    for owner, name, value in changes:
        setattr(owner, name, value)


def cases() -> Iterator[tuple[str, nn.Module, Callable[[nn.Module, Tensor], Tensor]]]:
    """Name, layer and call of each."""
    ends = torch.randint(NODES, (2, EDGES))
    graph = message.Graph(*ends, num_nodes=NODES)
    made: dict[str, nn.Module] = {
        "gcn": message.GraphConv(WIDTH, WIDTH),
        "sage": message.SAGEConv(WIDTH, WIDTH),
        "gin": message.GINConv(nn.Linear(WIDTH, WIDTH), 0.25),
        "gat": message.GATConv(WIDTH, 2, 8),
    }
    for name, layer in made.items():
        yield name, layer, lambda layer, x: layer(graph, x)
    kinds = torch.randint(RELATIONS, (EDGES,))
    typed = HeteroGraph.from_pyg(ends, kinds, num_nodes=NODES, num_relations=RELATIONS)
    relations = [("n0", f"r{i}", "n0") for i in range(RELATIONS)]
    convs: dict[str, Any] = {
        "rgcn": RGCNConv(WIDTH, WIDTH, RELATIONS),
        "rgat": RGATConv(WIDTH, 4, RELATIONS, heads=4),
        "hgt": HGTConv(WIDTH, WIDTH, (["n0"], relations), 4),
    }
    for name, conv in convs.items():
        conv.set_options(backend=Backend.TRITON)
        yield name, conv, lambda conv, x: conv(x, typed)


def block_cases() -> Iterator[tuple[str, nn.Module, Callable[..., Tensor]]]:
    """Of layers on a block of two types of nodes and four relations."""
    kinds = [(a, a + b, b) for a in "no" for b in "no"]
    ends = {k: tuple(torch.randint(NODES, (2, EDGES))) for k in kinds}
    graph = message.HeteroGraph(ends, {"n": NODES, "o": NODES})
    block = message.to_block(graph, {n: torch.arange(NODES) for n in "no"})
    makers: dict[str, Callable[[], nn.Module]] = {
        "rgcn": lambda: dglnn.GraphConv(WIDTH, WIDTH, norm="right", bias=False),
        "sage": lambda: dglnn.SAGEConv(WIDTH, WIDTH, "mean"),
        "rgat": lambda: dglnn.GATConv(WIDTH, 2, 8),
    }
    for name, make in makers.items():
        conv = dglnn.HeteroGraphConv({r: make() for _, r, _ in kinds})
        yield (
            f"block/{name}",
            conv,
            lambda conv, x: _both(conv(block, {"n": x, "o": x})),
        )

    @fn.pure
    def attend(e: Any, key: str) -> dict[str, Tensor]:
        return {"m": e.softmax((e.src[key] * e.dst["q"]).sum(-1, True)) * e.src[key]}

    calls = {k: (attend(f"k_{k[1]}"), fn.sum("m", "o")) for k in kinds}

    def updated(_: nn.Module, x: Tensor) -> Tensor:
        with block.local_scope():
            for _, r, _ in kinds:
                block[r].srcdata[f"k_{r}"] = block[r].dstdata["q"] = x
            block.multi_update_all(calls, "mean")
            return _both({n: block.dstnodes[n].data["o"] for n in "no"})

    yield "block/update", nn.Identity(), updated


def _both(found: dict[str, Tensor]) -> Tensor:
    return (found["n"] + found["o"]).flatten(1)


def calls_of(step: Callable[[], None]) -> int:
    """Python functions that a step calls, itself left out."""
    found: Counter[str] = Counter()

    def seen(frame: Any, event: str, _: Any) -> None:
        found[event] += 1

    sys.setprofile(seen)
    step()
    sys.setprofile(None)
    return found["call"] - 1


def main() -> None:
    """Print a line a layer."""
    as_on_a_gpu()
    for name, layer, call in chain(cases(), block_cases()):
        x = torch.randn(NODES, WIDTH, requires_grad=True)
        seed = torch.randn(NODES, WIDTH)
        leaves = [x, *layer.parameters()]

        def step(
            layer: nn.Module = layer,
            call: Any = call,
            x: Tensor = x,
            seed: Tensor = seed,
            leaves: list[Tensor] = leaves,
        ) -> None:
            for leaf in leaves:
                leaf.grad = None
            call(layer, x).backward(seed)

        for _ in range(4):
            step()
        print(name, calls_of(step))


if __name__ == "__main__":
    main()
