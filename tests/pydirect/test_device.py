"""The unified device as users meet it (Table 4.1 and what PyTorch promises)."""

import copy
import gc
import io
import weakref

import pytest
import torch

import pydirect
from pydirect import Affinity
from pydirect.region import region_of


def host(*shape: int) -> torch.Tensor:
    """A host-affine unified tensor 0, 1, 2, ..."""
    count = torch.Size(shape).numel()
    values = torch.arange(float(count)).reshape(shape)
    return values.to("unified").set_affinity_("host")


def test_table_4_1_creation() -> None:
    t = torch.arange(12.0).reshape(3, 4)
    u = t.to("unified")
    assert u.is_unified and not t.is_unified
    assert torch.equal(u.cpu(), t)
    assert torch.ones(16, device="unified").cpu().equal(torch.ones(16))
    assert torch.tensor([1, 2], device="unified").tolist() == [1, 2]
    assert torch.full((2, 2), 7, device="unified").sum().item() == 28
    assert torch.randn(8, device="unified").shape == (8,)
    assert torch.arange(5, device="unified").cpu().tolist() == [0, 1, 2, 3, 4]
    assert type(u) is torch.Tensor


def test_to_copies_and_unify_does_not() -> None:
    t = torch.zeros(4)
    copied, shown = t.to("unified"), pydirect.unify(t)
    t[0] = 5
    assert copied.tolist() == [0, 0, 0, 0]
    assert shown.tolist() == [5, 0, 0, 0]
    assert shown.data_ptr() == t.data_ptr()
    assert pydirect.to_host(shown).data_ptr() == t.data_ptr()


@pytest.mark.parametrize("bad", [torch.eye(2).to_sparse(), torch.ones(2).to("meta")])
def test_unify_refuses_what_it_cannot_show(bad: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="dense CPU tensor"):
        pydirect.unify(bad)
    with pytest.raises(ValueError, match="without gradients"):
        pydirect.unify(torch.ones(2, requires_grad=True))


def test_affinity_decides_and_moves_nothing() -> None:
    u = torch.arange(6.0).to("unified")
    assert u.affinity is Affinity.GPU
    address = u.data_ptr()
    view = u[2:]
    assert not (u + 1).is_unified
    assert u.set_affinity_("host") is u
    assert view.affinity is Affinity.HOST
    assert (u + 1).is_unified and (view * view).is_unified
    assert u.data_ptr() == address
    with pytest.raises(ValueError, match="is not a valid Affinity"):
        u.set_affinity_("tpu")
    with pytest.raises(ValueError, match="expects a unified tensor"):
        _ = torch.ones(2).affinity


def test_affinity_is_inherited() -> None:
    u = host(4)
    for made in (u.clone(), torch.zeros_like(u), copy.deepcopy(u), u + 1, u.double()):
        assert made.is_unified and made.affinity is Affinity.HOST
        assert made.data_ptr() != u.data_ptr()


def test_slicing_indexing_in_place() -> None:
    u = host(4, 5)
    t = torch.arange(20.0).reshape(4, 5)
    for cut in (
        lambda x: x[1],
        lambda x: x[:, 2],
        lambda x: x[1:3, ::2],
        lambda x: x[..., -1],
        lambda x: x[None],
        lambda x: x[torch.tensor([3, 0, -1])],
        lambda x: x[torch.tensor([0, 1]), torch.tensor([2, 3])],
        lambda x: x.t().reshape(-1),
        lambda x: x[x > 7],
    ):
        assert torch.equal(cut(u).cpu(), cut(t))
    view = u[1:3, ::2]
    assert view.data_ptr() == u.data_ptr() + 5 * 4
    for change in (
        lambda x: x[0].fill_(9),
        lambda x: x.mul_(2),
        lambda x: x[:, 1].copy_(torch.ones(4)),
        lambda x: x.__setitem__(torch.tensor([2]), -1.0),
        lambda x: x.__setitem__((slice(None), 0), torch.tensor(3.0)),
        lambda x: x.add_(x),
    ):
        change(u)
        change(t)
        assert torch.equal(u.cpu(), t)
    assert torch.equal(view.cpu(), t[1:3, ::2])


def test_printing() -> None:
    assert repr(host(2, 2)) == (
        "tensor([[0., 1.],\n        [2., 3.]], device='unified:0')"
    )
    assert "unified" in repr(torch.ones(3, device="unified"))
    assert "..." in repr(torch.zeros(2000, device="unified"))


def test_state_dict_round_trip() -> None:
    module = torch.nn.Linear(3, 2).to("unified")
    assert all(p.is_unified for p in module.parameters())
    state = module.state_dict()
    fresh = torch.nn.Linear(3, 2)
    fresh.load_state_dict(state)
    assert torch.equal(fresh.weight, module.weight.cpu())
    other = torch.nn.Linear(3, 2).to("unified")
    other.load_state_dict(fresh.state_dict())
    assert torch.equal(other.weight.cpu(), fresh.weight)


@pytest.mark.parametrize("where", ["unified", "cpu"])
def test_save_and_load(where: str) -> None:
    u = host(3, 4)
    file = io.BytesIO()
    torch.save({"u": u, "part": u[1]}, file)
    file.seek(0)
    back = torch.load(file, map_location=where, weights_only=True)
    assert back["u"].device.type == where
    assert torch.equal(back["u"].cpu(), u.cpu())
    assert torch.equal(back["part"].cpu(), u[1].cpu())


def test_out_and_resize() -> None:
    out = torch.empty(0, device="unified").set_affinity_("host")
    torch.add(host(4), 1, out=out)
    assert out.tolist() == [1, 2, 3, 4]
    u = host(4).resize_(2, 3)
    assert u.shape == (2, 3) and u.flatten()[:4].tolist() == [0, 1, 2, 3]


def test_dtypes_and_bits() -> None:
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int64,
        torch.bfloat16,
        torch.float8_e5m2,
    ):
        t = torch.tensor([0, 1, 1]).to(dtype)
        assert torch.equal(t.to("unified").cpu().view(torch.uint8), t.view(torch.uint8))
    z = torch.tensor([1 + 2j, 3 - 1j]).to("unified").set_affinity_("host")
    assert torch.equal(z.conj().cpu(), torch.tensor([1 - 2j, 3 + 1j]))
    assert torch.equal((z.conj() * 2).cpu(), torch.tensor([2 - 4j, 6 + 2j]))
    assert torch.equal(z.conj().imag.cpu(), torch.tensor([-2.0, 1.0]))


def test_memory_lives_as_long_as_the_last_alias() -> None:
    u = host(1000)
    dead = weakref.ref(region_of(u))
    view = u[10:].view(-1, 10)[3]
    kept = view.detach()
    del u, view
    gc.collect()
    assert dead() is not None
    assert kept.tolist() == list(range(40, 50))
    on_host = pydirect.to_host(kept)
    del kept
    gc.collect()
    assert dead() is None
    assert on_host.tolist() == list(range(40, 50))


def test_lifetime_torture() -> None:
    """Temporaries die while their views and graphs live; reused memory would show."""
    alive = []
    for round_ in range(120):
        view = torch.full((257,), float(round_)).to("unified").set_affinity_("host")[3:]
        if round_ % 3 == 0:
            view = (view.requires_grad_() * 1).detach()
        alive.append((round_, view))
        if round_ % 7 == 0:
            alive = alive[len(alive) // 2 :]
            gc.collect()
        for value, tensor in alive:
            assert tensor[0].item() == value and tensor[-1].item() == value


def test_enabling_again_does_nothing() -> None:
    before = torch.unified
    pydirect.enable()
    assert torch.unified is before
    assert torch.unified.device_count() == 1
    assert torch.device("unified").type == "unified"


def test_unify_says_how_an_array_becomes_a_tensor() -> None:
    with pytest.raises(ValueError, match=r"got ndarray: pass torch\.from_numpy"):
        pydirect.unify(torch.ones(3).numpy())  # type: ignore[arg-type]
