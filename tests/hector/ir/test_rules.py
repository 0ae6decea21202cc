"""Legality: a broken program or plan is refused, naming the pass and the node."""

import pytest

from hector.ir.builder import Builder
from hector.ir.kernels import Gemm, GemmRows, Loop, Plan, Traversal
from hector.ir.node import Node, Op, Program
from hector.ir.rules import IllegalIRError, check_plan, check_program
from hector.ir.types import Domain, Index, RowType

EDGE, NODE = Domain.EDGE, Domain.NODE


def broken(b: Builder) -> list[tuple[str, Node]]:
    """One node that breaks each rule, made behind the builder's checks."""
    x = b.input("x", NODE, (1, 4))
    e = b.input("e", EDGE, (1, 4))
    w = b.input("w", Domain.NTYPE, (1, 4, 4))
    kind = RowType(EDGE, (1, 4))
    return [
        ("leaves have no operands", b.make(Op.CONST, (x,), x.type, value=1.0)),
        ("stay on their rows", b.make(Op.EXP, (x,), kind)),
        ("stretch to the result", b.make(Op.ADD, (e, e), RowType(EDGE, (1, 5)))),
        ("READ follows its index", b.make(Op.READ, (e,), kind, index=Index.SRC)),
        (
            "AGG is the adjoint",
            b.make(Op.AGG, (x,), x.type, index=Index.DST, reduce="sum"),
        ),
        (
            "LINEAR multiplies rows",
            b.make(Op.LINEAR, (e, w), kind, index=Index.ETYPE, transpose=False),
        ),
        (
            "OUTER sums rows",
            b.make(Op.OUTER, (e, e), RowType(NODE, (1, 4, 4)), index=Index.DST),
        ),
        ("EINSUM sees parameters", b.make(Op.EINSUM, (x,), x.type, equation="hk->hk")),
    ]


@pytest.mark.parametrize("which", range(8))
def test_each_rule_catches_its_fault(which: int) -> None:
    words, node = broken(Builder())[which]
    with pytest.raises(IllegalIRError, match=f"after compact: .*{words}.*%"):
        check_program(Program(outputs=(("o", node),)), "compact")


def test_a_later_operand_is_refused() -> None:
    x = Node(Op.INPUT, (), RowType(NODE, (1, 1)), (("name", "x"),), serial=5)
    y = Node(Op.EXP, (x,), x.type, serial=2)
    with pytest.raises(IllegalIRError, match="reads a later node"):
        check_program(Program(outputs=(("o", y),)), "front end")


def traversal(*members: Node, loads: tuple[Node, ...] = ()) -> Traversal:
    loop = Loop(domain=NODE)
    return Traversal(loop=loop, members=members, stores=members, loads=loads)


def test_plans() -> None:
    b = Builder()
    x = b.input("x", NODE, (1, 4))
    y = b.unary(Op.EXP, x)
    z = b.unary(Op.LOG, y)
    make_y, make_z = traversal(y, loads=(x,)), traversal(z, loads=(y,))
    check_plan(Plan(kernels=(make_y, make_z), outputs=(z,)))
    check_plan(Plan(kernels=(make_z,), outputs=(z,), given=(y,)))
    faults = {
        "before it is made": Plan(kernels=(make_z, make_y), outputs=(z,)),
        "is made twice": Plan(kernels=(make_y, make_y), outputs=(y,)),
        "no kernel makes the output": Plan(kernels=(make_y,), outputs=(z,)),
        "stores nothing": Plan(kernels=(traversal(),), outputs=()),
    }
    for words, plan in faults.items():
        with pytest.raises(IllegalIRError, match=words):
            check_plan(plan)


def test_a_kernel_must_not_load_what_it_stores() -> None:
    """Splitting a row is another address of it: threads would race."""
    b = Builder()
    y = b.unary(Op.EXP, b.input("x", NODE, (1, 4)))
    heads = b.unary(Op.LOG, b.reshape(y, (2, 2)))
    with pytest.raises(IllegalIRError, match="loads what its kernel stores"):
        check_plan(Plan(kernels=(traversal(y, heads),), outputs=(y, heads)))
    apart = (traversal(y), traversal(heads, loads=(y,)))
    check_plan(Plan(kernels=apart, outputs=(heads,)))


def test_a_row_scale_is_a_scalar() -> None:
    b = Builder()
    x = b.input("x", NODE, (1, 4))
    w = b.input("w", Domain.NTYPE, (1, 4, 4))
    gemm = Gemm(
        out=b.linear(x, w),
        rows=GemmRows(value=x, scale=x),
        weight=w,
        type_index=Index.NTYPE,
        transpose=False,
    )
    with pytest.raises(IllegalIRError, match="per-row scalar"):
        check_plan(Plan(kernels=(gemm,), outputs=(gemm.out,)))
