"""Operations on parameters become few generated kernels."""

import pytest

from hector.ir.builder import Builder
from hector.ir.kernels import ParameterOp, Parameters, Plan
from hector.ir.node import Op
from hector.ir.types import Domain
from hector.passes.lifetimes import late_sums
from hector.passes.lower import lower
from hector.passes.parameters import generated
from hector.passes.pipeline import ALL_SETTINGS, Optimizations
from tests.hector.layer_models import MODELS, plans

BOTH = Optimizations(compact=True, reorder=True)


def blocks(plan: Plan) -> list[Parameters]:
    return [k for k in plan.kernels if isinstance(k, Parameters)]


@pytest.mark.parametrize("settings", ALL_SETTINGS, ids=str)
@pytest.mark.parametrize("model", sorted(MODELS))
def test_pytorch_runs_views_alone(model: str, settings: Optimizations) -> None:
    """No layer of Wu's leaves a product of parameters to PyTorch."""
    for _, plan in plans(model, 64, settings):
        left = [k.out.op for k in plan.kernels if isinstance(k, ParameterOp)]
        assert set(left) <= {Op.RESHAPE}


def test_reordered_attention_has_one_kernel_each_way() -> None:
    found = dict(plans("rgat", 64, BOTH))
    (forward,) = blocks(found[f"{BOTH}/forward"])
    assert len(forward.stores) == 2
    plan = found[f"{BOTH}/backward"]
    (backward,) = blocks(plan)
    # Two products and a sum stay in registers; two sums over types end behind the plan.
    assert len(backward.members) == 6 and len(backward.stores) == 3
    assert len(late_sums(plan) & set(backward.stores)) == 2


def test_a_contraction_of_a_contraction_is_a_second_kernel() -> None:
    b = Builder()
    w = b.input("w", Domain.ETYPE, (1, 64, 64))
    v = b.input("v", Domain.GLOBAL, (1, 64))
    once = b.einsum("hkn,hn->hk", w, v)
    twice = b.einsum("hkn,hk->hn", w, b.add(once, once))
    first, second = blocks(lower([twice]))
    assert first.stores == (once,) and second.stores == (twice,)
    assert set(second.loads) == {w, once}
    assert [n.op for n in second.members] == [Op.ADD, Op.EINSUM]


def test_a_view_between_operations_is_no_kernel() -> None:
    b = Builder()
    w = b.input("w", Domain.ETYPE, (1, 64, 64))
    v = b.input("v", Domain.GLOBAL, (1, 64))
    folded = b.reshape(b.einsum("hkn,hn->hk", w, v), (1, 64, 1))
    other = b.input("other", Domain.ETYPE, (1, 64, 1))
    total = b.add(folded, other)
    plan = lower([total, folded])
    first, second, view = plan.kernels
    assert isinstance(view, ParameterOp) and view.out is folded
    assert isinstance(first, Parameters) and first.stores == folded.inputs
    assert isinstance(second, Parameters) and second.stores == (total,)


def test_products_of_matrices_stay_with_pytorch() -> None:
    b = Builder()
    w1 = b.input("w1", Domain.ETYPE, (1, 64, 64))
    w2 = b.input("w2", Domain.GLOBAL, (1, 64, 64))
    product = b.einsum("hkn,hnm->hkm", w1, w2)
    assert not generated(product)
    (kernel,) = lower([product]).kernels
    assert kernel == ParameterOp(out=product)
    narrow = b.einsum("hkn,hnm->hkm", w1, b.input("w3", Domain.GLOBAL, (1, 64, 8)))
    assert generated(narrow)
