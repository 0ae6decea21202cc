"""Random relational graphs by the hundred thousand: `hector.nn` against plain loops.

Each session has a few layers and a few tensors. A call takes fresh tensors, ones that
were seen before, ones that were changed in place, or ones changed behind PyTorch
(`.data`, numpy, `set_`), pairs in new company, views of larger tensors, inference
tensors; between calls numbers, parameters and options of the layers change. Outputs and
gradients are compared with an oracle in float64 that loops over relations and knows no
graph. Written down after every block of sessions, so a rerun goes on.

    python -m recipes.bench safety.relational --graphs 100000
    python -m recipes.bench safety.relational --graphs 5000 --device cuda
"""

import copy
import random
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hector.nn import HGTConv, RGATConv, RGCNConv
from hector.nn.common import SETTINGS
from recipes.bench.harness.cli import Bench
from recipes.bench.safety.blocks import Sums, judge, run_campaign, seeds_of
from recipes.bench.safety.graph_compare import differs, results
from recipes.bench.safety.graph_loops import EDGE_TYPES, hgt, rgat, rgcn

CALLS = 40
"""Calls of one session, a graph each."""
BLOCK = 10
"""Sessions of a block."""
GPU_SHAPES = 6


class Session:
    """Layers and tensors that are used again, and what happened to them."""

    def __init__(self, seed: int, device: str, dtype: torch.dtype) -> None:
        # A kernel of every layer is compiled on a GPU: few shapes there, many graphs.
        shapes = seed if device == "cpu" else seed % GPU_SHAPES
        self.draw = random.Random(shapes)
        self.gen = torch.Generator().manual_seed(seed)
        self.device, self.dtype = torch.device(device), dtype
        torch.manual_seed(seed)
        self.relations, self.width = self.draw.randint(1, 4), self.draw.choice([2, 4])
        self.convs = [self.layer() for _ in range(2)]
        self.hgt = HGTConv(
            self.width,
            self.draw.choice([self.width, 2 * self.width]),
            (["a", "b"], EDGE_TYPES),
            heads=self.draw.choice([1, 2]),
        ).to(self.device, dtype)
        self.draw.seed(seed)
        for conv in (*self.convs, self.hgt):
            # The cost model's own choice takes most of a small graph's first call.
            names = [n for n in SETTINGS if n != "auto" or seed % 4 == 0]
            conv.set_optimization(
                self.draw.choice(names) if device == "cpu" else "both"
            )
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self.dicts: list[dict[Any, Tensor]] = []
        self.met: Counter[str] = Counter()

    def layer(self) -> RGCNConv | RGATConv:
        d, w, r = self.draw, self.width, self.relations
        made: RGCNConv | RGATConv
        if d.random() < 0.5:
            decomposed = d.choice([{}, {}, {"num_bases": 2}, {"num_blocks": 2}])
            made = RGCNConv(
                w,
                4,
                r,
                aggr=d.choice(["mean", "sum", "max"]),
                root_weight=d.random() < 0.7,
                bias=d.random() < 0.7,
                **decomposed,
            )
        else:
            made = RGATConv(
                w,
                d.choice([1, 3]),
                r,
                num_bases=d.choice([None, 2]),
                heads=d.choice([1, 2]),
                concat=d.random() < 0.6,
                attention_mechanism=d.choice(["across-relation", "within-relation"]),
                attention_mode=d.choice(
                    ["additive-self-attention", "multiplicative-self-attention"]
                ),
                edge_dim=d.choice([None, 3]),
                bias=d.random() < 0.7,
            )
        return made.to(self.device, self.dtype)

    # Tensors.

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.gen).to(self.device)

    def rows(self, count: int, width: int | None = None) -> Tensor:
        made = torch.randn(count, width or self.width, generator=self.gen)
        return made.to(self.device, self.dtype).requires_grad_()

    def fresh(self) -> tuple[Tensor, Tensor]:
        num = self.draw.choice([0, 1, 5, 9, 9, 16])
        nodes = self.draw.randint(1, 8)
        if self.draw.random() < 0.3:
            self.met["view of a larger tensor"] += 1
            return (
                self.integers(nodes, 2, 2 * num + 1)[:, :num],
                self.integers(self.relations, 2 * num + 1)[num : 2 * num],
            )
        return self.integers(nodes, 2, num), self.integers(self.relations, num)

    def pair(self) -> tuple[Tensor, Tensor]:
        """Edges of a call."""
        choice = self.draw.random()
        if not self.pairs or choice < 0.3:
            self.met["fresh"] += 1
            self.pairs.append(self.fresh())
            # The oldest die, and their ids are used again.
            del self.pairs[:-4]
            return self.pairs[-1]
        ends, kinds = self.draw.choice(self.pairs)
        if choice < 0.5:
            self.met["reused"] += 1
        elif choice < 0.6:
            like = [k for _, k in self.pairs if k.shape == kinds.shape]
            kinds = self.draw.choice(like)
            self.met["new company"] += 1
        else:
            self.change(self.draw.choice([ends, kinds]))
        return ends, kinds

    def change(self, t: Tensor) -> None:
        """New values in a tensor that a graph was made of."""
        if not t.numel():
            return
        high = int(t.max()) + 1 if t.dim() > 1 else self.relations
        new = self.integers(high, *t.shape)
        how = self.draw.choice(["copy_", "item", "out"])
        if self.device.type == "cpu" and self.draw.random() < 0.6:
            how = self.draw.choice([".data", "numpy", "set_", ".data =", "flip"])
        if how == "copy_":
            t.copy_(new)
        elif how == "item":
            t.view_as(t)[..., 0] = new[..., 0]
        elif how == "out":
            torch.add(new, 0, out=t)
        elif how == ".data":
            t.data.copy_(new)
        elif how == "numpy":
            t.numpy()[...] = new.numpy()
        elif how == "set_":
            t.set_(new)  # type: ignore[call-overload]
        elif how == "flip":
            t.data.copy_(t.flip(-1))
        else:
            t.data = new
        self.met[f"changed by {how}"] += 1

    def change_layer(self, conv: nn.Module) -> None:
        how = self.draw.choice(["data", "fused", "assign", "attribute", "no_grad"])
        with torch.no_grad():
            if how == "data":
                for p in conv.parameters():
                    p.data.mul_(0.9)
            elif how == "fused":
                for p in conv.parameters():
                    p.grad = torch.ones_like(p)
                torch.optim.AdamW(conv.parameters(), lr=0.01, fused=True).step()
            elif how == "assign":
                state = {k: v * 0.9 for k, v in conv.state_dict().items()}
                conv.load_state_dict(state, assign=True)
            elif how == "no_grad":
                for p in conv.parameters():
                    p.add_(0.01)
            elif isinstance(conv, RGCNConv):
                conv.aggr = self.draw.choice(["mean", "sum", "max"])
            elif isinstance(conv, RGATConv):
                conv.negative_slope = self.draw.choice([0.1, 0.2, 0.3])
        self.met[f"layer changed: {how}"] += 1

    # Calls.

    def step(self) -> str | None:
        """One call; what differs, if anything does."""
        if self.draw.random() < 0.1:
            self.change_layer(self.draw.choice([*self.convs, self.hgt]))
        if self.draw.random() < 0.3:
            return self.call_hgt()
        conv, (ends, kinds) = self.draw.choice(self.convs), self.pair()
        if self.draw.random() < 0.1:
            with torch.inference_mode():
                ends, kinds = ends.clone(), kinds.clone()
            self.met["inference tensors"] += 1
        plain = ends.clone(), kinds.clone()
        least = int(ends.max()) + 1 if ends.numel() else 1
        x = self.rows(least + self.draw.randint(0, 2))
        if isinstance(conv, RGCNConv):
            self.met["rgcn"] += 1
            return self.compare(
                conv,
                {"x": x},
                lambda: conv(x, ends, kinds),
                lambda c, v: rgcn(c, v["x"], *plain),
            )
        attr, inputs = None, {"x": x}
        additive = conv.attention_mode == "additive-self-attention"
        if conv.edge_dim is not None and additive and self.draw.random() < 0.7:
            attr = inputs["attr"] = self.rows(kinds.shape[0], conv.edge_dim)
        self.met["rgat"] += 1
        return self.compare(
            conv,
            inputs,
            lambda: conv(x, ends, kinds, attr),
            lambda c, v: rgat(c, v["x"], *plain, v.get("attr")),
        )

    def call_hgt(self) -> str | None:
        choice = self.draw.random()
        if not self.dicts or choice < 0.4:
            # Each relation may be absent, but not all.
            kept = [t for t in EDGE_TYPES if self.draw.random() < 0.7]
            made = {
                t: self.integers(3, 2, self.draw.randint(0, 6))
                for t in kept or EDGE_TYPES[:1]
            }
            self.dicts.append(made)
            del self.dicts[:-3]
            self.met["fresh dict"] += 1
        edges = self.draw.choice(self.dicts)
        if choice > 0.8:
            self.change(self.draw.choice(list(edges.values())))
        elif choice > 0.7:
            names, tensors = list(edges), list(edges.values())
            self.draw.shuffle(names)
            edges = dict(zip(names, tensors, strict=True))
            self.met["relations exchanged"] += 1
        x = {n: self.rows(self.draw.randint(3, 4)) for n in ("a", "b")}
        self.met["hgt"] += 1
        given = edges
        return self.compare(
            self.hgt,
            x,
            lambda: self.hgt(x, given),
            lambda c, v: hgt(c, v, given),
        )

    def compare(
        self,
        conv: nn.Module,
        inputs: dict[str, Tensor],
        ours: Callable[[], Any],
        oracle: Callable[[Any, dict[str, Tensor]], Any],
    ) -> str | None:
        """Outputs, and the gradients of inputs and parameters."""
        train = self.draw.random() < 0.6
        # The oracle computes in float64 whatever the layer does.
        double = {k: t.detach().double().requires_grad_() for k, t in inputs.items()}
        other = copy.deepcopy(conv).double()
        sides = (
            (ours, inputs, conv),
            (lambda: oracle(other, double), double, other),
        )
        mine, exact = (
            results(call, [*given.values(), *layer.parameters()], train)
            for call, given, layer in sides
        )
        self.met["training" if train else "evaluation"] += 1
        return differs(mine, exact, self.dtype, self.met)


def run_session(seed: int, device: str, dtype: torch.dtype) -> tuple[list[Any], Any]:
    """What is different in the calls of one seed, and their features."""
    session = Session(seed, device, dtype)
    different = []
    for call in range(CALLS):
        try:
            what = session.step()
        except Exception:  # the oracle takes everything that is drawn
            what = traceback.format_exc()[-1500:]
        if what is not None:
            different.append({"seed": seed, "call": call, "what": what})
    return different, session.met


def main(
    bench: Bench,
    *,
    graphs: int = 100_000,
    dtype: Literal["float64", "float32"] | None = None,
    first_block: int = 0,
    add: tuple[Path, ...] = (),
) -> None:
    """Blocks until the graphs are done or the time is over.

    Args:
        add: results of other processes
    """
    torch.set_num_threads(1)
    device = bench.on or "cpu"
    name = dtype or ("float64" if device == "cpu" else "float32")
    kind = torch.float64 if name == "float64" else torch.float32
    if bench.out.name == "relational.json":
        bench.out = bench.out.with_name(f"relational_{device}.json")
    about = {"device": device, "dtype": name, "calls": CALLS, "block": BLOCK}

    def block(number: int) -> Sums:
        run = partial(run_session, device=device, dtype=kind)
        return seeds_of(number, BLOCK, run, CALLS)

    cells = bench.cells(about)
    own = {"first_block": first_block, "add": add}
    judge(run_campaign(cells, block, graphs, **own), bench.out)
