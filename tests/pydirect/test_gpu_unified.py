"""The unified device with a GPU: places, streams, lifetime, Listing 4.2."""

import gc

import pytest
import torch

import pydirect
from pydirect import Affinity

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def table(rows: int = 1000, width: int = 33) -> tuple[torch.Tensor, torch.Tensor]:
    """A CPU table and the unified one with the same values."""
    plain = torch.arange(float(rows * width)).reshape(rows, width)
    return plain, plain.to("unified")


def test_table_4_2_places() -> None:
    plain, u = table()
    cuda = torch.ones(33, device="cuda")
    assert (u + 1).is_cuda
    assert (u + cuda).is_cuda
    assert (u + torch.ones(33)).is_cuda
    u.set_affinity_("host")
    assert (u + 1).is_unified and (u + torch.ones(33)).is_unified
    assert (u * cuda).is_cuda
    assert torch.equal((u * cuda).cpu(), plain)
    with pytest.raises(pydirect.PlacementError, match="one processor can reach"):
        torch.addcmul(cuda, torch.ones(33), u[0])
    on_host = torch.zeros(33)
    assert on_host.add_(u[1]) is on_host and torch.equal(on_host, plain[1])


def test_table_4_1_subscript_by_cuda_and_cpu() -> None:
    plain, u = table()
    index = torch.tensor([5, 0, 999, -1, 5])
    before = pydirect.counters().gathers
    for where in ("cpu", "cuda"):
        rows = u[index.to(where)]
        assert rows.is_cuda and torch.equal(rows.cpu(), plain[index])
    assert torch.equal(
        u[index.clamp(min=0).reshape(5, 1)].cpu(), plain[index.clamp(min=0)][:, None]
    )
    assert pydirect.counters().gathers == before + 3
    mask = plain[:, 0] > 500
    assert torch.equal(u[mask.cuda()].cpu(), plain[mask])


def test_in_place_from_both_sides_is_ordered() -> None:
    u = torch.zeros(1 << 20, device="unified")
    for _ in range(20):
        u.set_affinity_("gpu")
        u.add_(1)
        u.set_affinity_("host")
        u.mul_(2)
    want = torch.zeros(())
    for _ in range(20):
        want = (want + 1) * 2
    assert u.cpu().eq(want).all()


def test_gradients_come_back_unified() -> None:
    plain, u = table(50, 4)
    index = torch.tensor([3, 3, 7])
    plain.requires_grad_()
    u.requires_grad_()
    weight = torch.randn(4, 2)
    (plain[index] @ weight).square().sum().backward()
    (u[index] @ weight.cuda()).square().sum().backward()
    assert u.grad is not None and u.grad.is_unified
    assert u.grad.affinity is Affinity.HOST
    assert torch.allclose(u.grad.cpu(), plain.grad, rtol=1e-3)
    grad = u.grad.cpu()
    torch.optim.SGD([u], lr=0.1).step()
    assert torch.allclose(u.detach().cpu(), plain.detach() - 0.1 * grad)


def test_memory_outlives_work_in_flight() -> None:
    for round_ in range(30):
        u = torch.full((1 << 20,), float(round_)).to("unified")
        torch.cuda._sleep(2_000_000)
        got = u * 2
        on_device = pydirect.to_device(u, torch.device("cuda", 0))
        del u
        gc.collect()
        torch.zeros(1 << 20).to("unified")  # would reuse the memory
        assert got.eq(2 * round_).all() and on_device.eq(round_).all()


def test_unify_registers_in_place_and_shared_memory_too() -> None:
    plain = torch.arange(1 << 16, dtype=torch.float32)
    u = pydirect.unify(plain)
    assert (u + 0).is_cuda and torch.equal((u + 0).cpu(), plain)
    plain[3] = -1
    assert (u + 0)[3].item() == -1
    shared = torch.zeros(1 << 16).to("unified").share_memory_()
    shared.add_(1)
    torch.cuda.synchronize()
    assert shared.cpu().eq(1).all()


def test_host_memory_is_not_copied_to_the_gpu() -> None:
    features = torch.ones(1 << 18, 64).to("unified")  # 64 MiB
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    for _ in range(5):
        features[torch.randint(1 << 18, (1000,))].sum().item()
    assert torch.cuda.max_memory_allocated() - base < features.nbytes // 4


def test_pinning_still_works_beside_the_unified_device() -> None:
    t = torch.ones(100)
    assert not t.is_pinned() and t.pin_memory().is_pinned()
    assert torch.empty(10, pin_memory=True).is_pinned()
    assert t.pin_memory().to("cuda", non_blocking=True).sum().item() == 100
    assert torch.ones(4, device="cuda").to("cpu", non_blocking=True).shape == (4,)


def test_backward_on_a_side_stream_and_in_a_graph() -> None:
    """CUDA is still the accelerator: autograd follows the stream of the forward."""
    stream = torch.cuda.Stream()
    w = torch.ones(1 << 20, device="cuda", requires_grad=True)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        (w * 3).sum().backward()
        total = w.grad.sum()
    stream.synchronize()
    assert total.item() == 3 * (1 << 20)
    w.grad = None
    with torch.cuda.stream(stream):
        (w * 3).sum().backward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (w * 2).sum().backward()
    graph.replay()
    assert w.grad is not None and w.grad[0].item() == 5
