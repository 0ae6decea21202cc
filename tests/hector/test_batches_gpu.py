"""Mini-batches and captured steps on a GPU: nothing waits, nothing is compiled anew."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hector.capture import CapturedBatches, CapturedSampler, CapturedStep
from hector.graph import HeteroGraph, sampled_subgraph
from hector.nn import HGTConv, RGATConv, RGCNConv
from hector.sampling import NeighborSampler
from tests.no_waits import no_waits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NAMES = ("a", "b")
TYPES = (("a", "r0", "b"), ("b", "r1", "a"), ("a", "r2", "a"))
SIZES, WIDTH, EDGES = {"a": 4000, "b": 3000}, 32, 30_000


def whole() -> HeteroGraph:
    gen = torch.Generator().manual_seed(0)
    edges = {}
    for start, name, end in TYPES:
        s = torch.randint(SIZES[start], (EDGES,), generator=gen)
        d = torch.randint(SIZES[end], (EDGES,), generator=gen)
        edges[start, name, end] = torch.stack((s, d)).cuda()
    return HeteroGraph.from_dicts(SIZES, edges, (NAMES, TYPES))


def layer(which: str) -> nn.Module:
    torch.manual_seed(0)
    if which == "hgt":
        metadata = (list(NAMES), list(TYPES))
        return HGTConv(WIDTH, WIDTH, metadata, heads=2).cuda()
    kind = {"rgcn": RGCNConv, "rgat": RGATConv}[which]
    return kind(WIDTH, WIDTH, len(TYPES)).cuda()


@pytest.mark.parametrize("which", ["rgcn", "rgat", "hgt"])
def test_batches(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, conv = whole(), layer(which)
    oracle = layer(which).double()
    sampler = NeighborSampler(graph, (8, 8))
    x = torch.randn(graph.num_nodes, WIDTH, device="cuda")

    def step(found: Any, model: nn.Module, rows: Tensor) -> list[Tensor]:
        model.zero_grad()
        out = model(rows, found.graph)[found.seeds]
        out.square().mean().backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        return [out.detach(), *grads]

    for seed in range(3):
        seeds = torch.randperm(graph.num_nodes, device="cuda")[: 64 + 16 * seed]
        found = sampler.sample(seeds)
        got = step(found, conv, x[found.node_ids])
        exact = found.graph.replace(sampled=False)
        want = step(found._replace(graph=exact), oracle, x[found.node_ids].double())
        for mine, expected in zip(got, want, strict=True):
            error = float((mine.double() - expected).abs().max())
            assert error <= 2e-4 * max(float(expected.abs().max()), 1e-3)
    batches = [sampler.sample(torch.arange(n, n + 70).cuda()) for n in range(3)]
    import triton

    def never(*args: Any, **named: Any) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(triton, "compile", never)
    monkeypatch.setattr("triton.runtime.jit.JITFunction._do_compile", never)
    torch.cuda.synchronize()
    with no_waits():
        for found in batches:
            conv.zero_grad()
            conv(x[found.node_ids], found.graph).sum().backward()


def test_a_batch_of_tensors_does_not_wait() -> None:
    """Ids are checked all the same: results are NaN, and the next call raises."""
    conv = layer("rgcn")
    x = torch.randn(100, WIDTH, device="cuda")
    ends = torch.randint(100, (2, 500), device="cuda")
    kinds = torch.randint(3, (500,), device="cuda")

    def graph(ends: Tensor) -> HeteroGraph:
        return HeteroGraph.from_pyg(
            ends, kinds, num_nodes=100, num_relations=3, sampled=True
        )

    conv(x, graph(ends))
    torch.cuda.synchronize()
    with no_waits():
        good = conv(x, graph(ends))
        bad = ends.clone()
        bad[0, 3] += 1000
        # The device is behind: the call below cannot know yet.
        torch.cuda._sleep(200_000_000)
        wrong = graph(bad)
        out = conv(x, wrong)
    assert bool(good.isfinite().all()) and bool(out.isnan().all())
    with pytest.raises(ValueError, match="below its numbers"):
        conv(x, wrong)


@pytest.mark.parametrize("which", ["rgcn", "rgat", "hgt"])
def test_a_captured_step_is_the_step(which: str) -> None:
    graph = whole()
    x = torch.randn(graph.num_nodes, WIDTH, device="cuda")
    goal = torch.randint(WIDTH, (graph.num_nodes,), device="cuda")

    def losses(captured: bool) -> list[Tensor]:
        conv = layer(which)
        optimizer = torch.optim.Adam(conv.parameters(), lr=0.01, capturable=True)

        def step() -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            loss = functional.cross_entropy(conv(x, graph), goal)
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = CapturedStep(step) if captured else step
        return [run().clone() for _ in range(12)]

    plain, ours = losses(False), losses(True)
    assert float(plain[-1]) < float(plain[0])
    assert torch.equal(torch.stack(plain), torch.stack(ours))


@pytest.mark.parametrize("fanouts", [(4,), (8, 8)])
def test_a_captured_draw_is_the_draw(fanouts: tuple[int, ...]) -> None:
    sampler = NeighborSampler(whole(), fanouts)
    fixed = CapturedSampler(sampler, 64)
    on_cpu = NeighborSampler(whole().to("cpu"), fanouts)
    assert fixed.has_room
    for seed in range(5):
        seeds = torch.randperm(sum(SIZES.values()), device="cuda")[:64]
        gens = [torch.Generator("cuda").manual_seed(seed) for _ in range(2)]
        one, two = sampler.draw(seeds, gens[0]), fixed.draw(seeds, gens[1])
        assert torch.equal(one.node_ids, two.node_ids)
        assert torch.equal(one.seeds, two.seeds)
        assert torch.equal(one.edge_ids.sort()[0], two.edge_ids.sort()[0])
    key = torch.tensor(7)
    sizes = [
        s.draw_padded(seeds.to(key.device), key)[3].tolist()
        for s, key in ((sampler, key.cuda()), (on_cpu, key))
    ]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("which", ["rgcn", "hgt"])
def test_captured_training_repeats(which: str) -> None:
    """Draws and gathers that run ahead in threads change no sample and no loss."""
    from hector.train import (
        DataConfig,
        ModelConfig,
        NodeClassificationTrainer,
        OptimizerConfig,
        RunConfig,
    )

    def losses(capture: bool) -> list[float]:
        made = NodeClassificationTrainer(
            model=ModelConfig(layer=which, hidden_channels=16),
            data=DataConfig(name="aifb", scale=0.2, num_labelled=400),
            optimizer=OptimizerConfig(learning_rate=0.01),
            epochs=5,
            run=RunConfig(device="cuda", progress=False),
            batch=64,
            fanouts=(4, 4),
            capture=capture,
            features=torch.randn(7262, 8, generator=torch.Generator().manual_seed(0)),
        )
        return list(made.train().losses)

    first = losses(True)
    assert losses(True) == pytest.approx(first, rel=2e-3)
    assert losses(False) == pytest.approx(first, rel=2e-3)


@pytest.mark.parametrize("which", ["rgcn", "rgat", "hgt"])
def test_captured_batches(which: str) -> None:
    """Replays on new batches are the steps on the batches themselves."""
    graph, conv = whole(), layer(which)
    x = torch.randn(graph.num_nodes, WIDTH, device="cuda")
    sampler = NeighborSampler(graph, (8, 8))

    def gradients(loss: Tensor) -> list[Tensor]:
        conv.zero_grad(set_to_none=True)
        loss.backward()
        return [p.grad for p in conv.parameters() if p.grad is not None]

    def step(batch: Any, goal: Tensor, rows: Tensor) -> list[Tensor]:
        loss = ((conv(rows, batch.graph)[batch.seeds] - goal) ** 2).mean()
        return [loss.detach(), *gradients(loss)]

    batches = CapturedBatches(step, graph)
    for _ in range(8):
        seeds = torch.randperm(graph.num_nodes, device="cuda")[:100]
        goal = torch.randn(100, WIDTH, device="cuda")
        drawn = sampler.draw(seeds)
        found = [t.clone() for t in batches(drawn, goal, rows=[x[drawn.node_ids]])]
        made = sampled_subgraph(graph, drawn.node_ids, drawn.edge_ids)
        loss = ((conv(x[drawn.node_ids], made)[drawn.seeds] - goal) ** 2).mean()
        for mine, other in zip(found, [loss, *gradients(loss)], strict=True):
            torch.testing.assert_close(mine, other.detach(), rtol=1e-4, atol=1e-5)
        del loss  # its graph holds the gradients' nodes, of a stream not captured
    assert len(batches) <= 2
