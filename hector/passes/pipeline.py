"""From a program to its optimized forward and backward plans."""

from collections.abc import Iterable
from dataclasses import dataclass

from hector.ir.builder import Builder
from hector.ir.kernels import Kernel, Plan, Region
from hector.ir.node import BINARY, UNARY, Node, Op, Program, stored, topological
from hector.ir.rules import check_plan, check_program
from hector.passes import canonicalize, finish, optimize
from hector.passes.autodiff import differentiate
from hector.passes.lower import lower
from hector.passes.rewrite import Rule, rewrite


@dataclass(frozen=True, kw_only=True)
class Optimizations:
    """Which of Wu's two optional optimizations are applied."""

    compact: bool = False
    """Compact materialization."""
    reorder: bool = False
    """Linear operator reordering."""

    def __str__(self) -> str:
        names = [n for n in ("compact", "reorder") if getattr(self, n)]
        return "+".join(names) or "none"


ALL_SETTINGS = tuple(
    Optimizations(compact=c, reorder=r) for r in (False, True) for c in (False, True)
)


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A named step of the pipeline."""

    name: str
    rules: tuple[Rule, ...]


def passes(settings: Optimizations) -> tuple[Pass, ...]:
    """The steps for one setting, in order: data, to be printed or changed."""
    steps = [Pass(name="canonicalize", rules=canonicalize.RULES)]
    if settings.reorder:
        reorder = (*optimize.REORDER, *canonicalize.RULES)
        steps.append(Pass(name="reorder", rules=reorder))
    if settings.compact:
        compact = (*optimize.COMPACT, *canonicalize.RULES)
        steps.append(Pass(name="compact", rules=compact))
    return tuple(steps)


def optimize_program(b: Builder, program: Program, settings: Optimizations) -> Program:
    """The program after every pass, checked after each."""
    check_program(program, "front end")
    for step in passes(settings):
        program = rewrite(b, program, step.rules)
        check_program(program, step.name)
    return program


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """Expressions of a program's gradients."""

    heads: tuple[Node, ...]
    """Inputs: gradients of the outputs."""
    of: dict[Node, Node]
    """{program input: its gradient}, canonical; without those that are 0."""

    @property
    def program(self) -> Program:
        """A program of its own, that has gradients again."""
        return Program(outputs=tuple((f"grad:{n.name}", g) for n, g in self.of.items()))


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """Forward and backward plans, and what the first keeps for the second."""

    forward: Plan
    backward: Plan
    outputs: tuple[Node, ...]
    saved: tuple[Node, ...]
    """Values that backward reads: inputs or results of the forward plan."""
    output_grads: tuple[Node, ...]
    """Inputs of the backward plan, one an output."""
    gradients: dict[Node, Node]
    """{program input: its gradient}."""
    numbers: tuple[Node, ...]
    """What backward reads of forward's numbers, one a row and head, that no plan keeps:
    without kernels that compute them in passing, each costs an operation."""


def inference_plan(b: Builder, program: Program, known: Iterable[Node] = ()) -> Plan:
    """A plan that computes the outputs and keeps nothing else; `known` values are in
    memory already."""
    plan = lower(rewrite(b, program, finish.RULES).nodes, given=known)
    check_plan(plan)
    return plan


def _computed(kernel: Kernel) -> tuple[Node, ...]:
    """Everything a kernel has in registers and could store."""
    if isinstance(kernel, Region):
        return kernel.members
    return kernel.outputs


def _compared(program: Program, back: Program) -> list[Node]:
    """Forward values that the gradient of a maximum compares with it.

    They are kept: computed again, the last bit might differ, and no row would be the
    maximum.
    """
    forward = set(program.order())
    sides = [i for n in back.order() if n.op is Op.EQ for i in n.inputs]
    values = (stored(i.inputs[0] if i.op is Op.READ else i) for i in sides)
    return list(dict.fromkeys(v for v in values if v in forward and v.inputs))


def gradients_of(
    b: Builder, program: Program, wanted: Iterable[Node], given: Iterable[int]
) -> Gradients:
    """Gradients of the inputs `wanted`, of those outputs that are `given` one."""
    prefix = "grad:"
    taken = {n.name for n in program.inputs()}
    while any(prefix + name in taken for name, _ in program):
        # The gradients of gradients: their heads are others.
        prefix = "grad:" + prefix
    outputs = [program.outputs[i] for i in given]
    heads = tuple(b.input(prefix + name, n.domain, n.shape) for name, n in outputs)
    pairs = zip((n for _, n in outputs), heads, strict=True)
    found = differentiate(b, list(pairs), wanted)
    named = tuple((n.name, g) for n, g in found.items())
    back = rewrite(b, Program(outputs=named), canonicalize.RULES)
    check_program(back, "autodiff")
    return Gradients(heads=heads, of=dict(zip(found, back.nodes, strict=True)))


def _finished(b: Builder, gradients: Gradients) -> Program:
    back = rewrite(b, gradients.program, finish.RULES)
    check_program(back, "finish")
    return back


def backward_plan(
    b: Builder, gradients: Gradients, known: Iterable[Node]
) -> tuple[Plan, dict[Node, Node]]:
    """A plan of gradients where forward kept the values `known`, and {program input:
    what the plan gives}."""
    back = _finished(b, gradients)
    plan = lower(back.nodes, given=known)
    check_plan(plan)
    return plan, dict(zip(gradients.of, back.nodes, strict=True))


def training_plan(
    b: Builder,
    program: Program,
    wanted: tuple[Node, ...],
    known: frozenset[Node] = frozenset(),
) -> TrainingPlan:
    """Plans for a step that needs gradients of the inputs `wanted`; `known` values are
    in memory already."""
    gradients = gradients_of(b, program, wanted, range(len(program.outputs)))
    program, back = rewrite(b, program, finish.RULES), _finished(b, gradients)
    first = lower((*program.nodes, *_compared(program, back)), given=known)
    kept = known.union(n for k in first.kernels for n in _computed(k))
    backward, found = backward_plan(b, gradients, kept)
    saved = tuple(n for n in backward.given if n not in gradients.heads)
    needed = (n for n in saved if n.op not in (Op.INPUT, Op.GRAPH) and n not in known)
    forward = lower((*program.nodes, *needed), given=known)
    check_plan(forward)
    return TrainingPlan(
        forward=forward,
        backward=backward,
        outputs=program.nodes,
        saved=saved,
        output_grads=gradients.heads,
        gradients=found,
        numbers=_numbers(program, found.values(), saved),
    )


def _numbers(
    program: Program, gradients: Iterable[Node], saved: tuple[Node, ...]
) -> tuple[Node, ...]:
    done = set(program.order())
    back = topological(gradients)
    read = dict.fromkeys(i for n in back if n not in done for i in n.inputs)
    return tuple(
        n
        for n in read
        if n in done and n not in saved and n.shape[1] == 1 and n.op in COMPUTED
    )


COMPUTED = (BINARY | UNARY) - {Op.DETACH}
"""Row by row, into memory of their own."""
