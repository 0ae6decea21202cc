"""Blocks and their samplers, against loops over the edges of the whole graph."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hector.message import EID, NID, Graph, HeteroGraph, sample_neighbors, to_block
from hector.message import functions as fn
from hector.message.dataloading import (
    DataLoader,
    MultiLayerFullNeighborSampler,
    NeighborSampler,
)
from pydirect.integrations.hops import KeyedHops

KINDS = [("a", "r", "a"), ("a", "s", "b"), ("b", "t", "a")]
SIZES = {"a": 20, "b": 12}


def typed() -> HeteroGraph:
    gen = torch.Generator().manual_seed(3)
    edges = {
        k: tuple(torch.randint(SIZES[n], (60,), generator=gen) for n in (k[0], k[2]))
        for k in KINDS
    }
    g = HeteroGraph(edges, SIZES)
    for n in g.ntypes:
        g.nodes[n].data["h"] = torch.randn(
            SIZES[n], 3, generator=gen, dtype=torch.float64
        )
    for k in KINDS:
        g.edges[k].data["w"] = torch.rand(60, 1, generator=gen, dtype=torch.float64)
    return g


def check_block(g: HeteroGraph, block: HeteroGraph, seeds: dict[str, Tensor]) -> None:
    """Its edges are edges of the graph into the seeds, its features the graph's."""
    assert block.is_block
    for n, ids in seeds.items():
        assert torch.equal(block.dstnodes[n].data[NID], ids)
        sources = block.srcnodes[n].data[NID]
        assert torch.equal(sources[: ids.numel()], ids)
        assert sources.unique().numel() == sources.numel()
        assert torch.equal(block.srcnodes[n].data["h"], g.nodes[n].data["h"][sources])
        assert torch.equal(block.dstnodes[n].data["h"], g.nodes[n].data["h"][ids])
    for kind in g.canonical_etypes:
        u, v = block.edges(etype=kind)
        ids = block.edges[kind].data[EID]
        src, dst = g.find_edges(ids, etype=kind)
        assert torch.equal(block.srcnodes[kind[0]].data[NID][u], src)
        assert torch.equal(seeds[kind[2]][v], dst)
        assert torch.equal(block.edges[kind].data["w"], g.edges[kind].data["w"][ids])


def test_to_block() -> None:
    g = typed()
    seeds = {"a": torch.arange(20).flip(0), "b": torch.arange(12)}
    block = to_block(g, seeds)
    check_block(g, block, seeds)
    assert block.num_dst_nodes("a") == 20 and block.num_edges() == 180
    with pytest.raises(ValueError, match="some are missing"):
        to_block(g, {"a": [0]})
    with pytest.raises(ValueError, match="got one twice"):
        to_block(g, {"a": [0, *range(20)], "b": range(12)})
    with pytest.raises(ValueError, match="srcdata or dstdata"):
        _ = block.ndata
    own = to_block(g)
    for n in g.ntypes:
        ends = [g.edges(etype=k)[1] for k in KINDS if k[2] == n]
        assert torch.equal(own.dstnodes[n].data[NID], torch.cat(ends).unique())


def test_messages_in_a_block_are_those_of_the_graph() -> None:
    g = typed()
    ids = {"a": torch.tensor([4, 0, 7]), "b": torch.tensor([2])}
    block = MultiLayerFullNeighborSampler(1).sample(g, ids)[2][0]
    check_block(g, block, ids)

    def message(edges: Any) -> dict[str, Any]:
        return {"m": edges.src["h"] * edges.dst["h"] + edges.data["w"]}

    for how in ("sum", "max", "mul"):
        for kind in KINDS:
            for graph in (g, block):
                graph.update_all(message, getattr(fn, how)("m", "o"), etype=kind)
            end = kind[2]
            found = block.dstnodes[end].data["o"]
            torch.testing.assert_close(found, g.nodes[end].data["o"][ids[end]])
            assert "o" not in block.srcnodes[end].data
    call = (fn.copy_u("h", "m"), fn.mean("m", "o"))
    for graph in (g, block):
        graph.multi_update_all({"r": call, "t": call}, "sum")
    found = block.dstnodes["a"].data["o"]
    torch.testing.assert_close(found, g.nodes["a"].data["o"][ids["a"]])


def hops_of(g: HeteroGraph, **more: Any) -> KeyedHops:
    edges = {k: g.edges(etype=k) for k in g.canonical_etypes}
    return KeyedHops(edges, SIZES, device="cpu", **more)


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("replace", [False, True])
def test_sampled_blocks(keyed: bool, replace: bool) -> None:
    g = typed()
    fanouts: list[Any] = [{"r": 2, "s": 1, "t": 3}, 2]
    sampler = (
        NeighborSampler(fanouts, hops=hops_of(g, replace=replace))
        if keyed
        else NeighborSampler(fanouts, replace=replace)
    )
    seeds = {"a": torch.tensor([5, 1]), "b": torch.tensor([0, 3])}
    inputs, outputs, blocks = sampler.sample(g, seeds)
    assert outputs["a"].tolist() == [5, 1] and len(blocks) == 2
    ends = seeds
    for block, fanout in ((blocks[1], [2, 2, 2]), (blocks[0], [2, 1, 3])):
        check_block(g, block, ends)
        for kind, most in zip(KINDS, fanout, strict=True):
            whole = g.in_degrees(ends[kind[2]], etype=kind)
            found = block.in_degrees(etype=kind)
            wanted = (
                torch.where(whole > 0, most, 0) if replace else whole.clamp(max=most)
            )
            assert torch.equal(found, wanted)
            ids = block.edges[kind].data[EID]
            assert replace or ids.unique().numel() == ids.numel()
        # All sources of a block are the seeds of the one before.
        ends = {n: block.srcnodes[n].data[NID] for n in g.ntypes}
    assert all(torch.equal(inputs[n], ends[n]) for n in g.ntypes)


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_draws_are_as_likely_as_they_should_be(
    keyed: bool, replace: bool, weighted: bool
) -> None:
    """4,000 draws of two of five edges, one of weight 0 where they have weights."""
    kind, runs = ("n", "e", "m"), 4000
    src, dst = torch.arange(5).repeat(runs), torch.arange(runs).repeat_interleave(5)
    g = HeteroGraph({kind: (src, dst)}, {"n": 5, "m": runs})
    weights = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0]) if weighted else torch.ones(5)
    g.edata["p"] = weights.repeat(runs)
    hops = KeyedHops(
        {kind: (src, dst)},
        {"n": 5, "m": runs},
        device="cpu",
        replace=replace,
        weights={kind: g.edata["p"]} if weighted else None,
    )
    gen = torch.Generator().manual_seed(0)
    sampler = (
        NeighborSampler([2], hops=hops)
        if keyed
        else NeighborSampler(
            [2], prob="p" if weighted else None, replace=replace, generator=gen
        )
    )
    block = sampler.sample(g, {"m": torch.arange(runs)})[2][0]
    counts = torch.bincount(src[block.edata[EID]], minlength=5)
    share = weights / weights.sum()
    if replace:
        wanted = 2 * share
    else:  # first i, or first j and then i
        wanted = share.clone()
        for j in range(5):
            rest = share.clone()
            rest[j] = 0
            wanted += share[j] * rest / rest.sum()
    error = (counts / runs - wanted).abs()
    assert bool((error < 4.5 * (wanted.clamp(min=1e-9) / runs).sqrt() + 1e-9).all())


def test_frontiers() -> None:
    g = typed()
    part = sample_neighbors(g, {"a": [1, 2]}, {"r": 2})
    assert part.num_nodes("a") == 20 and part.num_edges("s") == 0
    assert torch.isin(part.edges(etype="r")[1], torch.tensor([1, 2])).all()
    src, dst = torch.randint(9, (2, 40))
    plain = Graph(src, dst, num_nodes=9)
    some = sample_neighbors(plain, [0, 4], -1)
    wanted = [i for n in (0, 4) for i in range(40) if int(dst[i]) == n]
    assert some.edata[EID].tolist() == wanted and some.num_nodes() == 9
    with pytest.raises(ValueError, match="at least 0, or -1"):
        sample_neighbors(plain, [0], -2)


def test_the_loader_walks_over_all_seeds() -> None:
    g = typed()
    sampler = NeighborSampler([2])
    loader = DataLoader(
        g, {"a": range(20), "b": [0, 5]}, sampler, batch_size=4, shuffle=True
    )
    assert len(loader) == 6
    seen: dict[str, list[int]] = {"a": [], "b": []}
    for inputs, seeds, blocks in loader:
        assert sum(s.numel() for s in seeds.values()) in (4, 2)
        assert torch.equal(inputs["a"], blocks[0].srcnodes["a"].data[NID])
        for n, ids in seeds.items():
            seen[n] += ids.tolist()
    assert sorted(seen["a"]) == list(range(20)) and sorted(seen["b"]) == [0, 5]
    assert seen["a"] != list(range(20))
    plain = Graph(*torch.randint(9, (2, 40)), num_nodes=9)
    dropped = DataLoader(plain, torch.arange(9), sampler, batch_size=4, drop_last=True)
    batches = [seeds.tolist() for _, seeds, _ in dropped]
    assert batches == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(DataLoader(plain, [0], sampler, num_workers=2, use_uva=True)) == 1
    with pytest.raises(ValueError, match="use_ddp=False"):
        DataLoader(plain, [0], sampler, use_ddp=True)
    with pytest.raises(TypeError, match="num_wokers"):
        DataLoader(plain, [0], sampler, num_wokers=2)
    with pytest.raises(ValueError, match="prob or mask"):
        NeighborSampler([2], prob="p", mask="m")
    with pytest.raises(ValueError, match="edge_dir"):
        NeighborSampler([2], edge_dir="out")


def test_what_was_compiled_for_one_block_serves_the_next() -> None:
    from hector.message.programs import Programs

    g = typed()
    made = HeteroGraph({k: g.edges(etype=k) for k in KINDS}, SIZES, programs=Programs())
    made.ndata["h"] = g.ndata["h"]
    for seed in range(4):
        ids = {"a": torch.randperm(20)[: 3 + seed]}
        block = NeighborSampler([3]).sample(made, ids)[2][0]
        block.update_all(fn.copy_u("h", "m"), fn.mean("m", "o"), etype="t")
    assert made.programs is not None and len(made.programs) == 1
