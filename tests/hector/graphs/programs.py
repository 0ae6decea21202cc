"""Random graph programs: what hector keeps, against fresh objects and plain loops.

A program has a graph, layers, message passing with edge features, and a few calls.
Between calls it writes: in place, through `.data`, by an optimizer's step, into the
indices. Calls run with gradients, under `no_grad` or `inference_mode`, now and then
inside `torch.compile` or under another default device and dtype; features are of all
dtypes, counts and booleans among them; graphs have hubs, repeated edges, empty
relations and isolated nodes. Each call is compared with the same call on fresh objects,
byte for byte, and in float64 with loops. `recipes/bench/safety/graph_programs.py` runs
many.
"""

import random
import traceback
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

import hector
from hector import HeteroGraph, Options
from hector.message import Graph
from hector.message import functions as fn
from hector.message import layers as message_layers
from hector.message.programs import Programs
from hector.nn import HGTConv, RGATConv, RGCNConv
from hector.nn.common import SETTINGS
from tests.hector.graphs.compare import far, off, outcome, same, surroundings
from tests.hector.graphs.loops import (
    EDGE_TYPES,
    REDUCERS,
    hgt,
    message_layer,
    reduced,
    rgat,
    rgcn,
    softmax,
)
from tests.hector.graphs.objects import Call, Objects, Passing, ties

CALLS = 4
WIDTH = 4
NAMES = [n for n in SETTINGS if n != "auto"]
DTYPES = [torch.float64, torch.float64, torch.float32, torch.bfloat16, torch.float16]
COMPILED = 0.004
"""Share of calls inside `torch.compile`, which takes most of a second each."""

# Layers of all programs share what was compiled: see `CompiledConv.compiled`.
_LAYERS: dict[str, dict[Any, Any]] = {name: {} for name in NAMES}
_PROGRAMS = {n: Programs(Options(optimizations=SETTINGS[n])) for n in NAMES}


@hector.compile(optimizations=SETTINGS["both"])
def user_layer(g: Any, feature: Any, weight: Any) -> Any:
    """A layer of a user's own: attention within relations."""
    for e in g.edges():
        e["h"] = e.src.feature @ weight[e.etype]
        e["a"] = hector.relation_softmax(hector.dot_prd(e["h"], e.dst.feature))
    for n in g.dst_nodes():
        n["out"] = 0.0
        for e in n.incoming_edges():
            n["out"] += e["a"] * e["h"]
    return g.ndata["out"]


class Program:
    """One program, drawn from its seed."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.gen = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        d = self.draw
        self.met: Counter[str] = Counter()
        self.dtype = d.choice(DTYPES)
        self.met[str(self.dtype)] += 1
        self.nodes, self.relations = d.randint(1, 10), d.randint(1, 4)
        self.edges = d.choice([0, 1, 5, 9, 20, 60])
        setting = d.choice(NAMES)
        convs = self.convs()
        for conv in convs.values():
            conv.to(self.dtype)
            if hasattr(conv, "set_optimization"):
                conv.set_optimization(setting)
                conv.compiled_layers = _LAYERS[setting]  # type: ignore[assignment]
        ends = self.ends()
        # Some relations stay empty.
        kinds = self.integers(d.randint(1, self.relations), self.edges)
        counts = {"a": self.nodes, "b": self.nodes}
        dicts = {
            t: self.integers(counts["a"], 2, d.randint(0, 6))
            for t in EDGE_TYPES
            if d.random() < 0.8
        } or {EDGE_TYPES[0]: self.integers(self.nodes, 2, 3)}
        source, target = ends if d.random() < 0.7 else ends.clone()
        if d.random() < 0.1:
            with torch.inference_mode():
                source, target = source.clone(), target.clone()
            self.met["inference indices"] += 1
        graph = Graph(source, target, num_nodes=self.nodes, programs=_PROGRAMS[setting])
        graph.ndata["h"] = self.rows(self.nodes)
        graph.edata["w"] = nn.Parameter(self.rows(self.edges).detach()[:, :1].clone())
        self.objects = Objects(convs, ends, kinds, dicts, graph, (source, target))

    def convs(self) -> dict[str, nn.Module]:
        d, r = self.draw, self.relations
        sage = message_layers.SAGEConv(
            WIDTH, d.choice([2, 4]), d.choice(["sum", "mean", "max", "min"])
        )
        other: nn.Module = d.choice(
            [
                lambda: message_layers.GraphConv(WIDTH, 3),
                lambda: message_layers.GINConv(nn.Identity()),
                lambda: message_layers.GATConv(WIDTH, 2, 2),
            ]
        )()
        return {
            "rgcn": RGCNConv(
                WIDTH,
                4,
                r,
                aggr=d.choice([*REDUCERS]),
                root_weight=d.random() < 0.7,
                bias=d.random() < 0.7,
                **d.choice([{}, {}, {"num_bases": 2}, {"num_blocks": 2}]),
            ),
            "rgat": RGATConv(
                WIDTH,
                d.choice([1, 3]),
                r,
                num_bases=d.choice([None, 2]),
                edge_dim=d.choice([None, 3]),
                bias=d.random() < 0.7,
                heads=d.choice([1, 2]),
                concat=d.random() < 0.6,
                attention_mechanism=d.choice(["across-relation", "within-relation"]),
                attention_mode=d.choice(
                    ["additive-self-attention", "multiplicative-self-attention"]
                ),
            ),
            "hgt": HGTConv(
                {"a": WIDTH, "b": d.choice([2, WIDTH, 8])},
                d.choice([WIDTH, 8]),
                (["a", "b"], EDGE_TYPES),
                heads=d.choice([1, 2]),
            ),
            "sage": sage,
            "other": other,
        }

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.gen)

    def ends(self) -> Tensor:
        kind = self.draw.choice(["uniform", "hub", "repeated", "isolated"])
        self.met[kind] += 1
        high = max(self.nodes // 2, 1) if kind == "isolated" else self.nodes
        ends = self.integers(high, 2, self.edges)
        if kind == "hub":
            ends[1] = torch.where(self.integers(5, self.edges) > 0, 0, ends[1])
        if kind == "repeated" and self.edges:
            ends[:, self.edges // 2 :] = ends[:, :1]
        return ends

    def rows(self, count: int, width: int = WIDTH) -> Tensor:
        made = torch.randn(count, width, generator=self.gen, dtype=torch.float64)
        return made.to(self.dtype).requires_grad_()

    # Writes.

    def write(self) -> None:
        """Something that a call has seen is changed."""
        d, o = self.draw, self.objects
        what = d.choice(["indices", "features", "parameters", "step", "column"])
        if what == "indices":
            # Both are the graph's and the layers', or each has its own.
            targets = [o.ends, o.kinds, *o.indices, *o.dicts.values()]
            self.write_indices(d.choice(targets))
        elif what == "features":
            name = "s" if "s" in o.graph.edata and d.random() < 0.5 else "w"
            self.write_features(d.choice([o.graph.ndata["h"], o.graph.edata[name]]))
        elif what == "parameters":
            conv = d.choice([*o.convs.values()])
            for p in conv.parameters():
                p.data.mul_(0.875)
            if isinstance(conv, RGCNConv) and d.random() < 0.5:
                conv.aggr = d.choice([*REDUCERS])
            self.met["parameters"] += 1
        elif what == "step":
            self.optimize([o.graph.edata["w"], *o.convs["rgcn"].parameters()])
        else:
            o.graph.ndata["h"] = self.rows(self.nodes)
            self.met["column"] += 1

    def write_features(self, t: Tensor) -> None:
        how = self.draw.choice(["in place", ".data", "numpy"])
        with torch.no_grad():
            if how == "in place":
                t.mul_(0.75)
            elif how == ".data" or t.dtype is torch.bfloat16:
                t.data.add_(0.5)
            else:
                t.detach().numpy()[...] *= 0.5
        self.met[f"features: {how}"] += 1

    def optimize(self, parameters: list[Tensor]) -> None:
        for p in parameters:
            p.grad = torch.ones_like(p)
        fused = self.draw.random() < 0.5 and self.dtype is not torch.float16
        torch.optim.AdamW(parameters, lr=0.05, fused=fused).step()
        for p in parameters:
            p.grad = None
        self.met["optimizer step"] += 1

    def write_indices(self, t: Tensor) -> None:
        if not t.numel():
            return
        high = self.relations if t is self.objects.kinds else self.nodes
        new = self.integers(high, *t.shape)
        how = self.draw.choice(["copy_", "item", ".data", "numpy"])
        if t.is_inference():
            how = self.draw.choice([".data", "numpy"])
        if how == "copy_":
            t.copy_(new)
        elif how == "item":
            t[..., 0] = new[..., 0]
        elif how == ".data":
            with torch.inference_mode(t.is_inference()):
                t.data.copy_(new)
        else:
            t.numpy()[...] = new.numpy()
        self.met[f"indices: {how}"] += 1

    # Calls.

    def step(self) -> str | None:
        """One call, after a write; what differs, if anything does."""
        d = self.draw
        if d.random() < 0.7:
            self.write()
        kinds = ["rgcn", "rgcn", "rgat", "hgt", "layer", "user", *["message"] * 4]
        choice = d.choice(kinds)
        if choice == "message":
            return self.call_message()
        if choice == "hgt":
            return self.call_hgt()
        x = self.rows(self.nodes)
        if d.random() < 0.15:
            x = self.integers(2, self.nodes, WIDTH)
            x = x.bool() if d.random() < 0.5 else x
            self.met["integers or booleans"] += 1
        self.met[choice] += 1
        inputs = {"x": x}
        if choice == "layer":
            return self.call_layer(inputs)
        if choice == "user":
            inputs["w"] = (
                torch.randn(
                    self.relations,
                    WIDTH,
                    WIDTH,
                    generator=self.gen,
                    dtype=torch.float64,
                )
                .to(self.dtype)
                .requires_grad_()
            )
            return self.compare(_user, _user_loop, inputs, ())
        conv: Any = self.objects.convs[choice]
        additive = "additive-self-attention"
        if choice == "rgat" and conv.edge_dim and conv.attention_mode == additive:
            inputs["attr"] = self.rows(self.edges, conv.edge_dim)
            self.met["edge attributes"] += 1
        oracle = {"rgcn": rgcn, "rgat": rgat}[choice]
        return self.compare(
            lambda o, v: o.convs[choice](v["x"], o.ends, o.kinds, *_attr(v)),
            lambda o, v: oracle(o.convs[choice], v["x"], o.ends, o.kinds, *_attr(v)),
            inputs,
            (choice,),
            tied=choice == "rgcn"
            and self.objects.convs["rgcn"].aggr == "median"
            and ties(x),
        )

    def call_layer(self, inputs: dict[str, Tensor]) -> str | None:
        name = self.draw.choice(["sage", "other"])

        def ours(o: Objects, v: dict[str, Tensor]) -> Any:
            return o.convs[name](o.graph, v["x"])

        def loop(o: Objects, v: dict[str, Tensor]) -> Any:
            return message_layer(o.convs[name], v["x"], *o.indices)

        return self.compare(ours, loop, inputs, (name,))

    def call_hgt(self) -> str | None:
        conv: Any = self.objects.convs["hgt"]
        widths = conv.in_channels
        inputs = {n: self.rows(self.nodes, widths[n]) for n in ("a", "b")}
        self.met["hgt"] += 1
        if self.draw.random() < 0.6:
            return self.compare(
                lambda o, v: o.convs["hgt"](v, o.dicts),
                lambda o, v: hgt(o.convs["hgt"], v, o.dicts),
                inputs,
                ("hgt",),
            )
        self.met["hgt on joined rows"] += 1
        most = max(widths.values())

        def joined(o: Objects, v: dict[str, Tensor]) -> Any:
            sizes = {n: self.nodes for n in ("a", "b")}
            graph = HeteroGraph.from_dicts(sizes, o.dicts, (["a", "b"], EDGE_TYPES))
            padded = [nn.functional.pad(t, (0, most - t.shape[1])) for t in v.values()]
            found = o.convs["hgt"](torch.cat(padded), graph).split(self.nodes)
            return dict(zip(v, found, strict=True))

        return self.compare(
            joined,
            lambda o, v: hgt(o.convs["hgt"], v, o.dicts),
            inputs,
            ("hgt",),
        )

    def call_message(self) -> str | None:
        d, graph = self.draw, self.objects.graph
        message = d.choice(["copy_u", "u_mul_e", "u_add_v", "u_sub_e", "user"])
        how = d.choice([*REDUCERS])
        if "s" in graph.edata and d.random() < 0.5:
            message = "u_add_s"
        if how == "std":
            # Of equal messages the root has no slope; none are, where each has its own.
            message = "u_mul_e"
        kind = d.choice(["all", "all", "pull", "some", "edges", "softmax"])
        seeds = self.integers(self.nodes, d.randint(1, 3))
        ids = self.integers(max(self.edges, 1), 3).unique()
        if not self.edges and kind == "some":
            kind = "all"
        self.met[f"message {kind}"] += 1
        passing = Passing(kind, message, how, seeds if kind == "pull" else ids)
        found = self.compare(passing.ours, passing.loop, {}, ("graph",), passing)
        if d.random() < 0.3:
            with torch.no_grad():
                graph.apply_edges(fn.u_add_v("h", "h", "s"))
            self.met["a column that a program made"] += 1
        return found

    # Comparison.

    def compare(
        self,
        ours: Call,
        loop: Call,
        inputs: dict[str, Tensor],
        read: tuple[str, ...],
        passing: Passing | None = None,
        tied: bool = False,
    ) -> str | None:
        """A call on kept objects, on fresh ones, and the loops' in float64; `tied`:
        gradients go to one of equal messages."""
        d, o = self.draw, self.objects
        mode = d.choice(["train", "train", "train", "no_grad", "inference_mode"])
        self.met[mode] += 1
        fresh, double = o.fresh(read), o.fresh(read)
        copies = {
            k: t.detach().clone().requires_grad_(t.requires_grad)
            for k, t in inputs.items()
        }
        run: Call = ours
        if d.random() < COMPILED:
            torch._dynamo.reset()
            run = torch.compile(ours, backend="eager")
            self.met["torch.compile"] += 1
        with surroundings(d, self.met):
            mine = outcome(run, o, inputs, read, mode)
        theirs = outcome(ours, fresh, copies, read, mode)
        for i, (a, b) in enumerate(zip(mine.parts, theirs.parts, strict=True)):
            if not same(a, b):
                return f"part {i} is not that of fresh objects: {off(a, b)}"
        if self.dtype is not torch.float64:
            return None
        values = {
            k: t.detach().double().requires_grad_(t.requires_grad)
            for k, t in inputs.items()
        }
        tied = tied or (passing is not None and passing.tied(double))
        return far(mine, outcome(loop, double, values, read, mode), tied)


def _attr(inputs: dict[str, Tensor]) -> list[Tensor]:
    return [inputs["attr"]] if "attr" in inputs else []


def _user(o: Objects, v: dict[str, Tensor]) -> Any:
    graph = HeteroGraph.from_pyg(
        o.ends, o.kinds, num_nodes=v["x"].shape[0], num_relations=v["w"].shape[0]
    )
    return user_layer(graph, v["x"], v["w"])


def _user_loop(o: Objects, v: dict[str, Tensor]) -> Any:
    (src, dst), count, relations = o.ends, v["x"].shape[0], v["w"].shape[0]
    h = torch.einsum("ei,eio->eo", v["x"][src], v["w"][o.kinds])
    score = (h * v["x"][dst]).sum(1, keepdim=True)
    att = softmax(score, dst * relations + o.kinds, count * relations)
    return reduced(att * h, dst, count, REDUCERS["sum"])


def run_program(seed: int) -> tuple[list[Any], Counter[str]]:
    """What is different in the calls of one seed, and their features."""
    program = Program(seed)
    for call in range(CALLS):
        try:
            what = program.step()
        except Exception:  # the loops take everything that is drawn
            what = traceback.format_exc()[-1500:]
        if what is not None:
            return [{"seed": seed, "call": call, "what": what}], program.met
    return [], program.met
