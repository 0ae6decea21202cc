"""Runs a step as a partition says: on DTensors, over the axes of a DeviceMesh.

    problem = trace(meta_model, forward)
    found = partition(problem, axes)
    mesh = init_device_mesh("cuda", found.ways, mesh_dim_names=("outer", "inner"))
    distribute(model, problem, found, mesh)      # parameters become DTensors
    with PlannedStep(problem, found, mesh):
        loss = model(batch).square().mean()
        loss.backward()
    optimizer.step()                             # DTensors, each rank its pieces

[Note: the order of operators]
The n-th operator that autograd leaves is the n-th one of the trace: the mode compares
their names and moves each operand to where the plan wants it, by one collective of one
axis at a time. Then the same operator runs on the local pieces. Module hooks, as in
`parallelize_module`, see neither the operators inside a module nor those of backward.
The dissertation's control dependencies and MultiFetch have no counterpart here: eager
operators run in the program's order, and a collective writes the fetched tensor whole.
(tests/ssdtrain/tools/search/test_runner.py)
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ssdtrain.errors import ConfigError
from ssdtrain.tools.search.calls import bound
from ssdtrain.tools.search.halo import with_halo
from ssdtrain.tools.search.moves import moves
from ssdtrain.tools.search.partial_run import run_part
from ssdtrain.tools.search.placement import (
    COPIED,
    Cut,
    Placement,
    Placements,
    Unreduced,
)
from ssdtrain.tools.search.problem import Chosen, Operation, Problem
from ssdtrain.tools.search.search import Partition
from ssdtrain.tools.search.trace import PASSED


def on_mesh(placements: Sequence[Placement]) -> list[Any]:
    """Return DTensor's placements."""
    return [
        Shard(one.dim)
        if isinstance(one, Cut)
        else Partial(one.reducer.value)
        if isinstance(one, Unreduced)
        else Replicate()
        for one in placements
    ]


def distribute(
    model: nn.Module, problem: Problem, found: Partition, mesh: DeviceMesh
) -> None:
    """Replace each trained parameter by a DTensor as planned. Raises ConfigError: the
    trace did not train one of them, or the mesh has other axes."""
    if tuple(mesh.shape) != found.ways:
        raise ConfigError(
            f"the plan expects a mesh of {found.ways}, got {tuple(mesh.shape)}; build "
            "it with init_device_mesh(device_type, plan.ways)"
        )
    for name, parameter in list(model.named_parameters()):
        number = problem.weights.get(name)
        if number is None:
            raise ConfigError(
                f"{name} got no gradient in the trace; a planned step expects the "
                "model that was traced, with every parameter trained"
            )
        placements = on_mesh(found.placements[number])
        piece = distribute_tensor(parameter.detach(), mesh, placements)
        path, _, own = name.rpartition(".")
        setattr(model.get_submodule(path), own, nn.Parameter(piece))


class PlannedStep(TorchDispatchMode):
    """One forward and backward. See [Note: the order of operators]."""

    def __init__(self, problem: Problem, found: Partition, mesh: DeviceMesh) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._problem = problem
        self._found = found
        self._mesh = mesh
        self._next = 0

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        super().__exit__(kind, value, trace)  # type: ignore[no-untyped-call]
        count = len(self._problem.operations)
        if kind is None and self._next != count:
            raise ConfigError(
                f"the plan expects {count} operators, the step ran {self._next}; trace "
                "the step that is run, forward and backward"
            )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.name in PASSED:
            return func(*args, **kwargs)
        at, operations = self._next, self._problem.operations
        call = operations[at].call if at < len(operations) else None
        if call is None or call.func is not func:
            wanted = "the end" if call is None else call.func
            raise ConfigError(
                f"operator {at} of the plan is {wanted}, the step ran {func}; trace "
                "the step that is run: the same model, shapes and precision"
            )
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise ConfigError(
                f"a planned step expects no random operators, got {func}; set dropout "
                "to 0"
            )
        self._next += 1
        with torch.no_grad():
            return self._run(operations[at], self._found.chosen[at], args, kwargs)

    def _run(
        self, one: Operation, chosen: Chosen, args: Any, kwargs: Mapping[str, Any]
    ) -> Any:
        call = one.call
        if call is None:
            raise ConfigError(f"{one.name} was not traced; it cannot be run")
        given = bound(call.func, args, kwargs)
        leaves, spec = tree_flatten(given)
        count = 0
        for at, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                needs = tuple(strategy.needs[count] for strategy in chosen)
                leaves[at] = self._fetch(leaf, needs)
                count += 1
        local = tree_unflatten(leaves, spec)
        total = self._total([strategy.gives[:1] for strategy in chosen])
        place = list(self._mesh.get_coordinate() or ())
        made = run_part(call, chosen, self._found.ways, place, local, total)
        return self._store(one, chosen, made, given)

    def _fetch(self, tensor: Tensor, needs: Placements) -> Tensor:
        """Move an operand to where it is needed; return this worker's part."""
        ways = self._found.ways
        if not isinstance(tensor, DTensor):
            copies = [Replicate()] * len(ways)
            tensor = DTensor.from_local(tensor, self._mesh, copies, run_check=False)
        own = _from_mesh(tensor.placements)
        local = tensor.to_local()
        for step in moves(own, needs, ways, tuple(tensor.shape)):
            cut = step.after[step.axis]
            if isinstance(cut, Cut) and cut.has_halo:  # the last moves
                local = with_halo(local, cut, self._mesh.get_group(step.axis))
            else:
                tensor = tensor.redistribute(placements=on_mesh(step.after))
                local = tensor.to_local()
        return local

    def _store(
        self, one: Operation, chosen: Chosen, made: Any, given: Mapping[str, Any]
    ) -> Any:
        """Move results to where the plan keeps them."""
        call = one.call
        is_in_place = call is not None and call.func._schema.is_mutable
        leaves, spec = tree_flatten(made)
        count = 0
        for at, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                number = one.results[count]
                gives = tuple(strategy.gives[count] for strategy in chosen)
                leaves[at] = self._kept(leaf, number, gives)
                count += 1
        if not is_in_place:
            return tree_unflatten(leaves, spec)
        target = next(x for x in tree_leaves(given) if isinstance(x, Tensor))
        if not isinstance(target, DTensor) or len(leaves) != 1:
            raise ConfigError(
                f"a planned step expects {one.name} to change a tensor of the step, "
                "got one from outside, such as a buffer of batch norm"
            )
        target.to_local().copy_(leaves[0].to_local())
        return target

    def _kept(self, local: Tensor, number: int, gives: Placements) -> Tensor:
        extent, ways = self._problem.tensors[number], self._found.ways
        tensor = DTensor.from_local(
            local,
            self._mesh,
            on_mesh(gives),
            run_check=False,
            shape=torch.Size(extent.shape),
            stride=extent.stride,
        )
        for step in moves(gives, self._found.placements[number], ways, ()):
            tensor = tensor.redistribute(placements=on_mesh(step.after))
        return tensor

    def _total(
        self, gives: Sequence[Sequence[Placement]]
    ) -> Callable[[Tensor], Tensor]:
        """Return what sums a value over the workers that share a reduction."""
        parts = [
            Partial() if own and isinstance(own[0], Unreduced) else Replicate()
            for own in gives
        ]

        def total(value: Tensor) -> Tensor:
            whole = DTensor.from_local(value, self._mesh, parts, run_check=False)
            copies = [Replicate()] * len(parts)
            found: Tensor = whole.redistribute(placements=copies).to_local()
            return found

        return total


def _from_mesh(placements: Sequence[Any]) -> Placements:
    found: list[Placement] = []
    for one in placements:
        if isinstance(one, Shard):
            found.append(Cut(one.dim))
        elif isinstance(one, Replicate):
            found.append(COPIED)
        else:
            raise ConfigError(f"an operand expects cuts or copies, got {one}")
    return tuple(found)
