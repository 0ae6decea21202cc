"""A step's problem, from one capture on the meta device by foresight's recorder."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ssdtrain.errors import ConfigError
from ssdtrain.tools.foresight.call import ELEMENT_BYTES
from ssdtrain.tools.foresight.capture import record
from ssdtrain.tools.foresight.graph import Graph, Node
from ssdtrain.tools.foresight.overheads import StepPhase
from ssdtrain.tools.foresight.recorder import Noted, Recorder
from ssdtrain.tools.foresight.spec import Kind
from ssdtrain.tools.search.calls import OperatorCall, call_of
from ssdtrain.tools.search.describe import describe_call
from ssdtrain.tools.search.problem import Extent, Operation, Problem
from ssdtrain.tools.search.strategies import Strategy, extents, strategies

CALL = "call"
"""Where a node keeps its `OperatorCall`."""
PASSED = frozenset({"aten::detach", "aten::alias", "aten::lift_fresh"})
"""Operators whose result is their operand: how many there are depends on who looks."""


def trace(model: nn.Module, forward: Callable[[], Any]) -> Problem:
    """Return the operators of a forward and backward of a model on the meta device. The
    optimizer's update ties a weight to its gradient (`Problem.ties`), and moves
    nothing. Raises ConfigError: as `foresight.capture.capture` does."""
    recorder = Recorder(model, amend=_with_call)
    record(recorder, forward, Kind.CPU)
    recorder.update("sgd")  # names each weight's gradient
    graph = recorder.graph({})
    problem = problem_of(graph)
    names = {
        recorder.storage_of(parameter): name
        for name, parameter in model.named_parameters()
    }
    trained = [weight for weight, _ in problem.ties]
    weights = {names[graph.tensors[n].storage]: n for n in trained}
    return replace(problem, weights=weights)


def _with_call(func: Any, arguments: tuple[Any, Any], noted: Noted) -> Noted | None:
    if noted.node.name in PASSED:
        return None
    args, kwargs = arguments
    read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    changed = [x for x in noted.written if any(x is y for y in read)]
    made = [x for x in noted.written if not any(x is y for y in read)]
    is_in_place = str(func._schema.name).endswith("_")
    results = changed[:1] if is_in_place else made
    call = call_of(func, args, kwargs, results)
    node = replace(noted.node, attr={**noted.node.attr, CALL: call})
    return Noted(node, read, results, noted.may_view)


def problem_of(graph: Graph) -> Problem:
    """Return a captured graph's problem."""
    operations: list[Operation] = []
    ties: list[tuple[int, int]] = []
    tensors = {
        number: Extent(tensor.shape, ELEMENT_BYTES[tensor.dtype], tensor.stride)
        for number, tensor in graph.tensors.items()
    }
    known: dict[Any, tuple[tuple[Strategy, ...], dict[str, int], bool]] = {}
    for node in graph.nodes:
        if node.phase is StepPhase.UPDATE:
            pairs = zip(node.inputs[::2], node.inputs[1::2], strict=True)
            ties += pairs
            continue
        operations.append(_operation(node, node.attr[CALL], known))
    used = {n for one in operations for n in (*one.operands, *one.results)}
    used |= {number for pair in ties for number in pair}
    return Problem(
        {number: tensors[number] for number in sorted(used)},
        tuple(operations),
        tuple(ties),
    )


def _operation(node: Node, call: OperatorCall, known: dict[Any, Any]) -> Operation:
    if len(node.outputs) != len(call.results):
        raise ConfigError(
            f"{call.name} expects {len(call.results)} results of their own, got "
            f"{len(node.outputs)}; a search cannot tell them apart"
        )
    key = repr((call.func, dict(call.arguments), call.results))
    if key not in known and (described := describe_call(call)) is not None:
        found = strategies(described, call.shapes, call.results)
        sizes = extents(described, call.shapes, call.results)
        known[key] = tuple(found), sizes, described.is_elementwise
    found, sizes, is_elementwise = known.setdefault(key, ((), {}, False))
    return Operation(
        name=call.name,
        operands=node.inputs,
        results=node.outputs,
        strategies=found,
        sizes=sizes,
        module=node.module,
        call=call,
        is_elementwise=is_elementwise,
    )
