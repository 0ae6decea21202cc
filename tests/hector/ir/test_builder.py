"""The inter-operator IR: interning, types on construction, what it looks like."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hector.ir.builder import Builder, IRTypeError, broadcast
from hector.ir.node import Node, Op, Program, oldest, topological, users
from hector.ir.types import COMPOSE, TARGET, Domain, Index


@pytest.fixture
def b() -> Builder:
    return Builder()


def rows(b: Builder, domain: Domain = Domain.NODE, width: int = 4) -> Node:
    return b.input(f"{domain.value}{width}", domain, (1, width))


def test_equal_nodes_are_one_object(b: Builder) -> None:
    x = rows(b)
    first = b.unary(Op.EXP, b.read(x, Index.SRC, Domain.EDGE))
    again = b.unary(Op.EXP, b.read(x, Index.SRC, Domain.EDGE))
    assert first is again
    assert first is not b.unary(Op.EXP, b.read(x, Index.DST, Domain.EDGE))
    slopes = {b.unary(Op.LEAKY_RELU, x, slope=s) for s in (0.1, 0.2, 0.1)}
    assert len(slopes) == 2


def test_nodes_print_their_operation_and_type(b: Builder) -> None:
    x = rows(b)
    w = b.input("w", Domain.ETYPE, (1, 4, 8))
    y = b.linear(b.read(x, Index.SRC, Domain.EDGE), w)
    assert [repr(n) for n in topological([y])] == [
        "%1 = input(, name=w) : etype[1, 4, 8]",
        "%0 = input(, name=node4) : node[1, 4]",
        "%2 = read(%0, index=src) : edge[1, 4]",
        "%3 = linear(%2, %1, index=etype, transpose=False) : edge[1, 8]",
    ]


def test_users_and_inputs(b: Builder) -> None:
    x = rows(b)
    y, z = b.unary(Op.EXP, x), b.unary(Op.LOG, x)
    total = b.add(y, z)
    found = users([total])
    assert set(found[x]) == {y, z}
    assert found[total] == []
    assert Program(outputs=(("o", total),)).inputs() == [x]


BAD = [
    (lambda b: b.read(rows(b), Index.ETYPE, Domain.EDGE), "etype leads from edge to"),
    (lambda b: b.read(rows(b), Index.SRC, Domain.NODE), "nowhere"),
    (lambda b: b.agg(rows(b), Index.SRC), "src is not an index of node"),
    (lambda b: b.agg(rows(b, Domain.EDGE), Index.DST, "min"), "'sum' or 'max'"),
    (lambda b: b.add(rows(b), rows(b, Domain.EDGE)), "operands on one domain"),
    (lambda b: b.add(rows(b, width=4), rows(b, width=3)), "broadcastable"),
    (lambda b: b.reshape(rows(b), (3, 2)), "expected 4 elements"),
    (lambda b: b.slice(rows(b), 2, 3), "columns 2:5"),
    (lambda b: b.expand(rows(b), (1, 8)), "equal or broadcastable"),
    (lambda b: b.unary(Op.ADD, rows(b)), "add is not unary"),
    (lambda b: b.binary(Op.EXP, rows(b), rows(b)), "exp is not binary"),
    (lambda b: b.einsum("hk->k", rows(b)), "einsum is for parameters"),
    (
        lambda b: b.linear(rows(b), b.input("w", Domain.ETYPE, (1, 4, 2))),
        "have no etype",
    ),
    (
        lambda b: b.linear(rows(b), b.input("w", Domain.NTYPE, (1, 5, 2))),
        r"expected rows of shape \[1, 5\]",
    ),
    (
        lambda b: b.linear(rows(b), b.input("v", Domain.NTYPE, (1, 4))),
        "weight of rank 3",
    ),
    (
        lambda b: b.outer(rows(b), rows(b, Domain.EDGE), Domain.ETYPE),
        "outer product of",
    ),
]


@pytest.mark.parametrize(("make", "words"), BAD)
def test_ill_typed_operations_are_refused(make, words: str, b: Builder) -> None:
    with pytest.raises(IRTypeError, match=words):
        make(b)


SHAPES = st.tuples(st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 5]))


@settings(max_examples=60, deadline=None)
@given(SHAPES, SHAPES)
def test_broadcast_is_pytorchs(x: tuple[int, int], y: tuple[int, int]) -> None:
    import torch

    try:
        want = tuple(torch.broadcast_shapes(x, y))
    except RuntimeError:
        with pytest.raises(IRTypeError):
            broadcast(x, y)
        return
    assert broadcast(x, y) == want


def test_composed_indices_lead_where_their_parts_do() -> None:
    for (start, first, second), both in COMPOSE.items():
        middle = TARGET[start, first]
        assert TARGET[middle, second] is TARGET[start, both]


def test_constants_and_parameters_are_spread(b: Builder) -> None:
    e = rows(b, Domain.EDGE)
    v = b.input("v", Domain.ETYPE, (1, 4))
    assert b.mul(e, b.const(2.0)).domain is Domain.EDGE
    product = b.mul(v, e)
    assert product.domain is Domain.EDGE
    assert product.inputs[0] == b.read(v, Index.ETYPE, Domain.EDGE)
    # Reshaping twice, or to the same shape, makes nothing new.
    flat = b.reshape(b.reshape(e, (2, 2)), (1, 4))
    assert flat is e


def test_an_order_of_known_nodes_stops_at_the_oldest(b: Builder) -> None:
    """What is older leads to none of them: the order of the rest is the same."""
    x = b.input("x", Domain.NODE, (1, 4))
    deep = x
    for _ in range(5):
        deep = b.unary(Op.EXP, deep)
    known = b.unary(Op.EXP, deep)
    top = b.binary(Op.ADD, b.unary(Op.EXP, known), b.binary(Op.MUL, known, deep))
    whole = topological([top])
    some = topological([top], oldest([known, top]))
    assert some == [n for n in whole if n.serial >= known.serial]
    assert known in some and deep not in some and x in whole
