"""Operators under the placement rules: values, gradients, devices, errors."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import pydirect

OPERATORS: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda a, b: a + b,
    lambda a, b: a * b - b / (a.abs() + 1),
    lambda a, b: a @ b.t(),
    lambda a, b: F.linear(a, b, b[:, 0]),
    lambda a, b: torch.cat([a, b]).sum(0),
    lambda a, b: torch.stack([a, b]).amax(0),
    lambda a, b: torch.where(a > b, a, b),
    lambda a, b: F.relu(a).mean() + F.gelu(b).mean(),
    lambda a, b: torch.einsum("ij,kj->ik", a, b),
    lambda a, b: a.softmax(-1) * b.log_softmax(0),
    lambda a, b: F.layer_norm(a, (a.shape[1],)) + b.std(),
    lambda a, b: a[:, 1:].clamp(min=0) + b[:, :-1],
    lambda a, b: a.sort(dim=0).values + b.cumsum(0),
    lambda a, b: a.index_select(0, torch.tensor([2, 0, 2])) * b[:3],
    lambda a, b: a.scatter_add(0, torch.zeros(a.shape, dtype=torch.long), b),
    lambda a, b: F.pad(a, (1, 1)).unfold(1, 2, 1).sum(-1)[:, : b.shape[1]] + b,
    lambda a, b: F.cross_entropy(a, b.argmax(1)),
    lambda a, b: F.embedding(torch.tensor([[1, 0]]), a) + b[:1],
]
IDS = [str(i) for i in range(len(OPERATORS))]


def leaves(affinity: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The same two leaves on the CPU and unified, shape (4, 4)."""
    generator = torch.Generator().manual_seed(1)
    plain = [torch.randn(4, 4, generator=generator) for _ in range(2)]
    unified = [t.to("unified").set_affinity_(affinity) for t in plain]
    for t in plain + unified:
        t.requires_grad_()
    return plain, unified


@pytest.mark.parametrize("affinity", ["host", "gpu"])
@pytest.mark.parametrize("operator", OPERATORS, ids=IDS)
def test_values_gradients_and_places(
    operator: Callable[..., torch.Tensor], affinity: str
) -> None:
    if affinity == "gpu" and torch.cuda.is_available():
        pytest.skip("bitwise only where the accelerator is the CPU")
    plain, unified = leaves(affinity)
    want, got = operator(*plain), operator(*unified)
    assert torch.equal(got.detach().cpu(), want.detach())
    assert got.is_unified == (affinity == "host")
    want.square().sum().backward()
    got.square().sum().backward()
    for t, u in zip(plain, unified, strict=True):
        if t.grad is None:
            assert u.grad is None
            continue
        assert u.grad is not None and u.grad.is_unified
        assert torch.equal(u.grad.cpu(), t.grad)


@settings(deadline=None, max_examples=60)
@given(
    shape=st.lists(st.integers(0, 4), min_size=0, max_size=3),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.int32, torch.bool]),
    affinity=st.sampled_from(["host", "gpu"]),
    transposed=st.booleans(),
)
def test_any_layout(
    shape: list[int], dtype: torch.dtype, affinity: str, transposed: bool
) -> None:
    t = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    t = t.transpose(0, -1) if transposed and t.dim() else t
    u = t.to("unified").set_affinity_(affinity)
    if min(shape, default=2) > 1:
        assert u.stride() == t.stride()
    assert torch.equal((u + u).cpu(), t + t)
    assert torch.equal((u == u).cpu(), t == t)
    assert u.sum().item() == t.sum().item()


def test_mixes_with_cpu_operands() -> None:
    cpu, gpu_side = torch.ones(3), torch.arange(3.0).to("unified")
    assert not (gpu_side + cpu).is_unified
    assert not (gpu_side * torch.tensor(2.0)).is_unified
    host_side = gpu_side.clone().set_affinity_("host")
    assert (host_side + cpu).is_unified
    assert (host_side * torch.tensor(2.0)).is_unified
    assert not (host_side + gpu_side).is_unified
    assert cpu.add_(gpu_side) is cpu
    assert cpu.tolist() == [1, 2, 3]


def test_optimizers_work_in_place() -> None:
    for make in (torch.optim.SGD, torch.optim.Adam):
        results = []
        for device in ("cpu", "unified"):
            torch.manual_seed(0)
            p = torch.nn.Parameter(torch.ones(5, device=device))
            optimizer = make([p], lr=0.1)
            for _ in range(3):
                (p * p).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            results.append(p.detach().cpu())
        assert torch.allclose(*results)


def test_changing_a_saved_operand_raises() -> None:
    u = torch.ones(3).to("unified").set_affinity_("host")
    w = torch.ones(3, requires_grad=True)
    loss = (u * w).sum()
    u.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_changing_a_saved_result_raises() -> None:
    if torch.cuda.is_available():
        pytest.skip("results are copied into pinned memory: nothing saved is changed")
    u = torch.ones(3).to("unified").set_affinity_("host").requires_grad_()
    y = u.exp()
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_in_place_under_autograd() -> None:
    for affinity in ("host", "gpu"):
        u = torch.ones(3).to("unified").set_affinity_(affinity).requires_grad_()
        scale = torch.tensor([1.0, 2, 3]).to("unified").set_affinity_(affinity)
        y = u.clone()
        y[1:].mul_(scale[1:])
        y.sum().backward()
        assert u.grad is not None and u.grad.tolist() == [1, 2, 3]


def test_double_backward() -> None:
    u = torch.tensor([2.0]).to("unified").set_affinity_("host").requires_grad_()
    (first,) = torch.autograd.grad(u.pow(3).sum(), u, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), u)
    assert first.is_unified and second.item() == 12


def test_inference_mode_and_no_grad() -> None:
    u = torch.ones(3, 2).to("unified").requires_grad_()
    with torch.no_grad():
        assert not (u * 2).requires_grad
    with torch.inference_mode():
        made = torch.ones(3, device="unified") * 2
        assert made.tolist() == [2, 2, 2]


def test_unsupported_operators_say_so() -> None:
    u = torch.eye(3).to("unified")
    with pytest.raises(pydirect.UnsupportedOperatorError, match="not supported on uni"):
        u.to_sparse()
    with pytest.raises(NotImplementedError, match="unified"):
        torch.eye(3).to_sparse().to("unified")
    with pytest.raises(pydirect.UnsupportedOperatorError, match="placed on cpu"):
        torch.ones(2, 2, dtype=torch.complex64).to("unified").floor()
    with pytest.raises(IndexError):
        u[torch.tensor([3])]


def test_operators_of_other_libraries() -> None:
    library = torch.library.Library("pydirect_test", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    u = torch.ones(2).to("unified").set_affinity_("host")
    assert torch.ops.pydirect_test.twice(u).tolist() == [2, 2]
    assert torch.ops.pydirect_test.twice(u).is_unified
    library._destroy()


def test_counters_count() -> None:
    before = pydirect.counters().calls
    torch.ones(2).to("unified") + 1
    assert pydirect.counters().calls > before


def test_expanded_results_and_gradients_get_memory_of_their_own() -> None:
    from pydirect.placement import Affinity
    from pydirect.transfer import _copied

    source = torch.arange(3.0).expand(2, 3)
    made = _copied(source, Affinity.HOST)
    assert made.is_contiguous() and torch.equal(made.cpu(), source)
    made[0, 0] = 9
    assert made[1, 0].item() == 0
