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
from torch.nn import functional

from hector.nn import HGTConv, RGATConv, RGCNConv
from hector.nn.common import SETTINGS
from recipes.bench.harness.cli import Bench
from recipes.bench.safety.blocks import Sums, judge, run_campaign, seeds_of

CALLS = 40
"""Calls of one session, a graph each."""
BLOCK = 10
"""Sessions of a block."""
GPU_SHAPES = 6
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4}
"""Largest error over the largest value of the result."""
EDGE_TYPES = [("a", "r0", "a"), ("a", "r1", "a"), ("a", "r2", "b"), ("b", "r3", "a")]


def grouped(rows: Tensor, group: Tensor, count: int, how: str) -> Tensor:
    """[count, ...] sum, mean or max of the rows of each group; 0 for none."""
    index = group.view(-1, *(1,) * (rows.dim() - 1)).expand_as(rows)
    out = rows.new_zeros(count, *rows.shape[1:])
    if how == "max":
        return out.scatter_reduce(0, index, rows, "amax", include_self=False)
    total = out.index_add(0, group, rows)
    if how == "mean":
        num = torch.bincount(group, minlength=count).clamp(min=1).to(rows.dtype)
        total = total / num.view(-1, *(1,) * (rows.dim() - 1))
    return total


def softmax(score: Tensor, group: Tensor, count: int) -> Tensor:
    """Over the rows of each group."""
    top = grouped(score.detach(), group, count, "max")[group]
    power = (score - top).exp()
    return power / (grouped(power, group, count, "sum")[group] + 1e-16)


def rgcn(conv: RGCNConv, x: Tensor, ends: Tensor, kinds: Tensor) -> Tensor:
    """Equation 3.1, relation by relation."""
    weight: Tensor = conv.weight
    if conv.comp is not None:
        weight = torch.einsum("rb,bio->rio", conv.comp, weight)
    if conv.num_blocks is not None:
        weight = torch.stack([torch.block_diag(*w) for w in weight])
    out = x.new_zeros(x.shape[0], conv.out_channels)
    for r in range(conv.num_relations):
        src, dst = ends[:, kinds == r]
        how = {"add": "sum"}.get(conv.aggr, conv.aggr)
        # The maximum is of rows, before the product.
        out = out + grouped(x[src], dst, x.shape[0], how) @ weight[r]
    if conv.root is not None:
        out = out + x @ conv.root
    return out if conv.bias is None else out + conv.bias


def rgat(
    conv: RGATConv, x: Tensor, ends: Tensor, kinds: Tensor, attr: Tensor | None
) -> Tensor:
    """Additive or multiplicative attention across or within relations."""
    weight: Tensor = (
        torch.einsum("rb,bio->rio", conv.att, conv.basis)
        if conv.num_bases is not None
        else conv.weight
    )
    (src, dst), count = ends, x.shape[0]
    every = torch.einsum("ni,rio->rno", x, weight)
    left, right = every[kinds, dst], every[kinds, src]
    query, key = left @ conv.q, right @ conv.k
    if conv.attention_mode == "additive-self-attention":
        score = query + key
        if attr is not None and conv.lin_edge is not None and conv.e is not None:
            score = score + conv.lin_edge(attr) @ conv.e
        score = functional.leaky_relu(score, conv.negative_slope)
    else:
        score = query * key
    group, groups = dst, count
    if conv.attention_mechanism == "within-relation":
        group, groups = dst * conv.num_relations + kinds, count * conv.num_relations
    att = softmax(score, group, groups)
    rows = right.view(-1, conv.heads, conv.out_channels) * att[:, :, None]
    out = grouped(rows, dst, count, "sum")
    out = out.flatten(1) if conv.concat else out.mean(1)
    return out if conv.bias is None else out + conv.bias


def hgt(
    conv: HGTConv, x: dict[str, Tensor], edges: dict[Any, Tensor]
) -> dict[str, Tensor]:
    """Attention over all relations into a node."""
    heads, width = conv.heads, conv.out_channels // conv.heads
    kqv = {n: conv.kqv_lin.lins[n](t).chunk(3, 1) for n, t in x.items()}
    shaped = {n: [p.view(-1, heads, width) for p in ps] for n, ps in kqv.items()}
    scores: dict[str, list[Tensor]] = {n: [] for n in x}
    values: dict[str, list[Tensor]] = {n: [] for n in x}
    groups: dict[str, list[Tensor]] = {n: [] for n in x}
    k_rel, v_rel = conv.k_rel.by_relation(), conv.v_rel.by_relation()
    for i, kind in enumerate(conv.edge_types):
        if kind not in edges:
            continue
        src, dst = edges[kind]
        k = torch.einsum("ehd,hdf->ehf", shaped[kind[0]][0][src], k_rel[i])
        v = torch.einsum("ehd,hdf->ehf", shaped[kind[0]][2][src], v_rel[i])
        score = (shaped[kind[2]][1][dst] * k).sum(-1) * conv.p_rel["__".join(kind)]
        scores[kind[2]].append(score / width**0.5)
        values[kind[2]].append(v)
        groups[kind[2]].append(dst)
    out = {}
    for n, rows in x.items():
        if n not in conv.dst_node_types:
            continue
        total = rows.new_zeros(rows.shape[0], heads, width)
        if scores[n]:
            group = torch.cat(groups[n])
            att = softmax(torch.cat(scores[n]), group, rows.shape[0])
            total = grouped(
                torch.cat(values[n]) * att[:, :, None], group, rows.shape[0], "sum"
            )
        made = conv.out_lin.lins[n](functional.gelu(total.flatten(1)))
        if made.shape[1] == rows.shape[1]:
            gate = conv.skip[n].sigmoid()
            made = gate * made + (1 - gate) * rows
        out[n] = made
    return out


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
        with torch.set_grad_enabled(train):
            found = _flat(ours())
        leaves = [*inputs.values(), *conv.parameters()] if train else []
        mine = [*found, *_gradients(found, leaves)]
        # The oracle computes in float64 whatever the layer does.
        double = {k: t.detach().double().requires_grad_() for k, t in inputs.items()}
        other = copy.deepcopy(conv).double()
        with torch.set_grad_enabled(train):
            wanted = _flat(oracle(other, double))
        leaves = [*double.values(), *other.parameters()] if train else []
        theirs = [*wanted, *_gradients(wanted, leaves)]
        self.met["training" if train else "evaluation"] += 1
        return _difference(mine, theirs, TOLERANCE[self.dtype])


def _flat(found: Any) -> list[Tensor]:
    return list(found.values()) if isinstance(found, dict) else [found]


def _gradients(outputs: list[Tensor], leaves: list[Tensor]) -> list[Tensor | None]:
    """Under a fixed slope."""
    if not leaves:
        return []
    loss = sum(
        (
            t * torch.linspace(-1, 1, max(t.numel(), 1)).to(t)[: t.numel()].view_as(t)
        ).sum()
        for t in outputs
    )
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        return [None] * len(leaves)
    return list(torch.autograd.grad(loss, leaves, allow_unused=True))


def _difference(
    mine: list[Tensor | None], theirs: list[Tensor | None], tolerance: float
) -> str | None:
    for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        if a is None or b is None:
            other = b if a is None else a
            if other is not None and bool(other.any()):
                return f"part {i}: {a} and {b}"
            continue
        if a.shape != b.shape:
            return f"part {i}: shapes {tuple(a.shape)} and {tuple(b.shape)}"
        if not a.numel():
            continue
        scale = max(float(b.detach().abs().max()), 1.0)
        error = float((a.detach().double() - b.detach()).abs().max()) / scale
        if not error <= tolerance:
            return f"part {i}: error {error:.3g}"
    return None


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
