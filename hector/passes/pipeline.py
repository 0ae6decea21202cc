"""From a program to its optimized forward and backward plans."""

from dataclasses import dataclass

from hector.ir.builder import Builder
from hector.ir.kernels import Kernel, Plan, Region
from hector.ir.node import Node, Op, Program, stored
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


def inference_plan(b: Builder, program: Program) -> Plan:
    """A plan that computes the outputs and keeps nothing else."""
    plan = lower(rewrite(b, program, finish.RULES).nodes)
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


def training_plan(
    b: Builder, program: Program, wanted: tuple[Node, ...]
) -> TrainingPlan:
    """Plans for a step that needs gradients of the inputs `wanted`."""
    heads = {
        node: b.input(f"grad:{name}", node.domain, node.shape) for name, node in program
    }
    grads = differentiate(b, heads, wanted)
    named = tuple((n.name, g) for n, g in grads.items())
    back = rewrite(b, Program(outputs=named), canonicalize.RULES)
    check_program(back, "autodiff")
    program, back = (rewrite(b, p, finish.RULES) for p in (program, back))
    check_program(back, "finish")
    simplified = dict(zip(grads, back.nodes, strict=True))
    first = lower((*program.nodes, *_compared(program, back)))
    kept = {n for k in first.kernels for n in _computed(k)}
    backward = lower(back.nodes, given=kept)
    saved = tuple(n for n in backward.given if n not in heads.values())
    needed = (n for n in saved if n.op not in (Op.INPUT, Op.GRAPH))
    forward = lower((*program.nodes, *needed))
    for plan in (forward, backward):
        check_plan(plan)
    return TrainingPlan(
        forward=forward,
        backward=backward,
        outputs=program.nodes,
        saved=saved,
        output_grads=tuple(heads.values()),
        gradients=simplified,
    )
