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
    assert not got.is_unified  # under autograd: see the note in pydirect.transfer
    assert operator(*(u.detach() for u in unified)).is_unified == (affinity == "host")
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


def test_gradients_of_views_land_in_the_leaf() -> None:
    plain = torch.arange(12.0).reshape(3, 4).requires_grad_()
    u = torch.arange(12.0).reshape(3, 4).to("unified").requires_grad_()
    for t in (plain, u):
        loss = (t[1:, ::2] * 3).sum() + t.t()[2].square().sum() + (t * 2).sum()
        loss.backward()
        t[0].exp().sum().backward()
    assert u.grad is not None and u.grad.is_unified
    assert u.grad.affinity is pydirect.Affinity.HOST
    assert torch.allclose(u.grad.cpu(), plain.grad)


def test_a_layer_trains_with_its_weights_in_host_memory() -> None:
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh())
    unified = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh())
    unified.load_state_dict(plain.state_dict())
    unified.to("unified")
    x = torch.randn(5, 4)
    for model in (plain, unified):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    for p, u in zip(plain.parameters(), unified.parameters(), strict=True):
        assert u.is_unified and torch.allclose(u.detach().cpu(), p.detach(), atol=1e-6)


def test_what_autograd_cannot_reach_is_refused() -> None:
    u = torch.ones(3).to("unified").requires_grad_()
    w = torch.ones(3, requires_grad=True)
    buffer = torch.zeros(3).to("unified")
    for call in (
        lambda: buffer.mul_(w),
        lambda: buffer.copy_(w),
        lambda: torch.zeros(3).add_(u),
        lambda: w.to("unified"),
        lambda: w.clone().to("unified"),
    ):
        with pytest.raises(pydirect.UnsupportedOperatorError):
            call()
    assert u.clone().device.type == "cpu" and u.cpu().requires_grad
    (u.cpu() * 2 + u.double()).sum().backward()
    assert u.grad is not None and u.grad.tolist() == [3, 3, 3]
    with torch.no_grad():
        assert buffer.copy_(w).tolist() == [1, 1, 1] and w.to("unified").is_unified


def test_cuda_stays_the_accelerator() -> None:
    found = torch.accelerator.current_accelerator()
    built = torch.version.cuda is not None
    assert (found.type if found else None) == ("cuda" if built else None)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    t = torch.ones(3, device=device, requires_grad=True)
    (t * 2).sum().backward()
    assert t.grad is not None and t.grad.tolist() == [2, 2, 2]


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
    from pydirect.transfer import staged_copy

    source = torch.arange(3.0).expand(2, 3)
    made = staged_copy(source, Affinity.HOST)
    assert made.is_contiguous() and torch.equal(made.cpu(), source)
    made[0, 0] = 9
    assert made[1, 0].item() == 0


def test_scalars_do_not_decide_for_larger_operands() -> None:
    u = torch.zeros(3).to("unified").set_affinity_("host")
    scalar = torch.tensor(2.0, device="unified")
    assert scalar.affinity is pydirect.Affinity.GPU
    assert (u + scalar).is_unified and not (scalar + scalar).is_unified
    u[1] = 7
    u[0].copy_(scalar)
    assert u.tolist() == [2, 7, 0]
