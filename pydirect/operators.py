"""How one operator call on unified tensors is carried out.

`run` looks at the operands, asks `pydirect.placement` for the rule, shows every unified
operand to the chosen processor through an alias (no byte moves), calls PyTorch's own
kernel, and turns the result into what the rule says.
"""

import enum
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from pydirect.errors import PlacementError, UnsupportedOperatorError
from pydirect.placement import (
    Affinity,
    Compute,
    Cpu,
    Mix,
    Operands,
    Result,
    Rule,
    Written,
    mix_of,
    rule_for,
)
from pydirect.region import DEVICE_TYPE, region_of
from pydirect.rows import as_row_gather, gather_rows
from pydirect.transfer import (
    HOST,
    Machine,
    adopt,
    alias_on,
    copy_into,
    enter_graph,
)

Operator = torch._ops.OpOverload
_INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})


class Kind(enum.Enum):
    """What an operator does to its operands, and where it was taken over."""

    DIFFERENTIABLE = "differentiable"  # makes new tensors; above autograd
    FUNCTIONAL = "functional"  # makes new tensors; below autograd
    WRITES = "writes"  # writes operands; below autograd


def run(
    machine: Machine,
    op: Operator,
    kind: Kind,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Carry out one call by the placement rules.

    Raises:
        PlacementError: the rules refuse the mix of operands.
        UnsupportedOperatorError: PyTorch has no such kernel for the processor chosen.
    """
    machine.counters.calls += 1
    rows = _rows(machine, op, args)
    if rows is not None:
        return rows
    written = list(_written(op, args, kwargs)) if kind is Kind.WRITES else []
    operands = list(_tensors((*args, *kwargs.values())))
    if kind is Kind.WRITES:
        refuse_recorded_writes(str(op), operands, written)
    rule = _rule(op, operands, written)
    device = _device(machine, rule, operands)
    differentiable = (
        kind is Kind.DIFFERENTIABLE
        and torch.is_grad_enabled()
        and any(t.requires_grad for t in operands)
    )
    call = _Call(
        machine=machine,
        rule=rule,
        device=device,
        written=written,
        operands=operands,
        differentiable=differentiable,
    )
    try:
        result = op(*call.convert(args), **call.convert(kwargs))
    except UnsupportedOperatorError:
        raise  # ours: it says what the operand lacks, not the kernel
    except NotImplementedError as error:
        raise UnsupportedOperatorError(
            f"{op} was placed on {device.type} ({rule.why}), which has no kernel for "
            f"these operands: move them with .to({device.type!r}) and look for another "
            "operator, or switch the affinity of the unified operand"
        ) from error
    return call.finish(result)


def _rows(machine: Machine, op: Operator, args: tuple[Any, ...]) -> torch.Tensor | None:
    """The call's result where the rules make it a gather on a GPU; else None.

    Asked first and with as few questions as possible: a training loop makes these
    calls, and one of them waits for what Python takes.
    """
    request = as_row_gather(op, args)
    if request is None:
        return None
    index, affinity = request.index.device, region_of(request.table).affinity
    if not _gives_cuda(
        affinity is Affinity.GPU,
        index.type == "cuda",
        index.type == "cpu" and request.index.dim() > 0,
        request.wraps,
    ):
        return None
    device = index if index.type == "cuda" else machine.accelerator()
    if device.type != "cuda":
        return None
    machine.counters.gathers += 1
    return gather_rows(request, device)


@functools.cache
def _gives_cuda(gpu_affine: bool, on_cuda: bool, on_cpu: bool, subscript: bool) -> bool:
    """Whether the rules put the rows of a table on the GPU: four facts, asked often.

    Args:
        gpu_affine: affinity of the table.
        on_cuda: where the index is.
        on_cpu: whether the index is a CPU tensor, and no scalar.
        subscript: whether the call is an indexing operator.
    """
    cpu = Cpu.TENSORS if on_cpu else Cpu.NONE if on_cuda else Cpu.SCALARS
    facts = Operands(
        mix=Mix.GPU if gpu_affine else Mix.HOST,
        cuda=on_cuda,
        cpu=cpu,
        written=Written.NOTHING,
        indexing=subscript,
    )
    return rule_for(facts).result is Result.CUDA


def _cpu_kind(operands: Iterable[torch.Tensor]) -> Cpu:
    on_cpu = [t for t in operands if t.device.type == "cpu"]
    if not on_cpu:
        return Cpu.NONE
    return Cpu.TENSORS if any(t.dim() > 0 for t in on_cpu) else Cpu.SCALARS


@dataclass(kw_only=True)
class _Call:
    machine: Machine
    rule: Rule
    device: torch.device
    written: list[torch.Tensor]
    operands: list[torch.Tensor]
    differentiable: bool
    """Whether autograd records the call above us."""

    shown: dict[int, torch.Tensor] = field(default_factory=dict)
    """Aliases by the id of their operand, so that one operand has one alias."""

    def convert(self, value: Any) -> Any:
        """``value`` as the chosen processor sees it."""
        if isinstance(value, torch.Tensor):
            return self._convert_tensor(value)
        if isinstance(value, (list, tuple)):
            return type(value)(self.convert(item) for item in value)
        if isinstance(value, dict):
            return {name: self.convert(item) for name, item in value.items()}
        if isinstance(value, torch.device) and value.type == DEVICE_TYPE:
            return self.device
        return value

    def _convert_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in self.shown:
            return self.shown[id(tensor)]
        if tensor.device.type == DEVICE_TYPE:
            writes = any(tensor is other for other in self.written)
            shown = self._alias(tensor, writes)
        elif tensor.device.type == "cpu" and self._must_send(tensor):
            self.machine.counters.staged_bytes += tensor.nbytes
            shown = tensor.to(self.device, non_blocking=True)
        else:
            shown = tensor
        self.shown[id(tensor)] = shown
        return shown

    def _must_send(self, tensor: torch.Tensor) -> bool:
        return (
            self.device.type == "cuda"
            and tensor.dim() > 0
            and self.rule.compute is Compute.GPU
        )

    def _alias(self, tensor: torch.Tensor, writes: bool) -> torch.Tensor:
        if not self.differentiable:
            return alias_on(tensor, self.device, writes=writes)
        if tensor.requires_grad:
            return enter_graph(tensor, self.device)
        shown = alias_on(tensor, self.device, writes=False)
        region_of(tensor).track(shown)
        return shown

    def finish(self, result: Any) -> Any:
        """The result as the rule says, and the regions' book-keeping."""
        for tensor in self.written:
            if tensor.device.type == DEVICE_TYPE:
                self._finish_write(tensor)
        if self.rule.result is Result.WRITTEN:
            return self._originals(result)
        if self.rule.result is Result.UNIFIED:
            return self._unified(result)
        return result

    def _finish_write(self, tensor: torch.Tensor) -> None:
        shown = self.shown[id(tensor)]
        if shown.shape != tensor.shape:
            # An `out=` operand that the kernel has resized.
            tensor.resize_(shown.shape)
            copy_into(tensor, shown, non_blocking=False)
        region_of(tensor).note_write()

    def _originals(self, result: Any) -> Any:
        back = {id(shown): key for key, shown in self.shown.items()}
        originals = {id(t): t for t in self.operands}

        def original(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return originals[back[id(value)]] if id(value) in back else value
            if isinstance(value, (list, tuple)):
                return type(value)(original(item) for item in value)
            return value

        return original(result)

    def _unified(self, result: Any) -> Any:
        if isinstance(result, torch.Tensor):
            if result.requires_grad:
                return result
            return adopt(result, Affinity.HOST, self.machine.counters)
        if isinstance(result, (list, tuple)):
            return type(result)(self._unified(item) for item in result)
        return result


def refuse_recorded_writes(
    name: str, operands: Sequence[torch.Tensor], written: Sequence[torch.Tensor]
) -> None:
    """See [Note: Gradients do not travel] in `pydirect.transfer`.

    Raises:
        UnsupportedOperatorError: autograd would send a gradient to a unified tensor.
    """
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in operands):
        return
    unified = [t for t in operands if t.device.type == DEVICE_TYPE]
    if any(t.requires_grad or any(t is w for w in written) for t in unified):
        raise UnsupportedOperatorError(
            f"{name} writes in place under autograd with unified operands: use the "
            "operator that returns a new tensor, or torch.no_grad()"
        )


def _rule(
    op: Operator, operands: list[torch.Tensor], written: list[torch.Tensor]
) -> Rule:
    unified = _deciding(operands, written)
    facts = Operands(
        mix=mix_of(region_of(t).affinity for t in unified),
        cuda=any(t.device.type == "cuda" for t in operands),
        cpu=_cpu_kind(operands),
        written=_written_kind(written),
        indexing=op._schema.name.removeprefix("aten::") in _INDEXING,
    )
    rule = rule_for(facts)
    if rule.compute is Compute.REFUSE:
        devices = ", ".join(f"{t.device}{list(t.shape)}" for t in operands)
        raise PlacementError(
            f"{op} expects operands that one processor can reach, got {devices}: "
            f'{rule.why}; move the CPU tensors with .to("cuda") or .to("unified")'
        )
    return rule


def _deciding(
    operands: list[torch.Tensor], written: list[torch.Tensor]
) -> list[torch.Tensor]:
    """The unified operands whose affinity counts: scalars do not next to others.

    ``u[0] = 7`` makes PyTorch create a unified scalar of its own.
    """
    unified = [t for t in operands if t.device.type == DEVICE_TYPE]
    larger = [t for t in unified if t.dim() > 0]
    changed = [t for t in written if t.device.type == DEVICE_TYPE]
    return larger or changed or unified


def _written_kind(written: list[torch.Tensor]) -> Written:
    kinds = {t.device.type for t in written}
    for name, kind in (
        ("cpu", Written.CPU),
        ("cuda", Written.CUDA),
        (DEVICE_TYPE, Written.UNIFIED),
    ):
        if name in kinds:
            return kind
    return Written.NOTHING


def _device(machine: Machine, rule: Rule, operands: list[torch.Tensor]) -> torch.device:
    if rule.compute is Compute.HOST:
        return HOST
    for tensor in operands:
        if tensor.device.type == "cuda":
            return tensor.device
    return machine.accelerator()


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _written(
    op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[torch.Tensor]:
    for position, argument in enumerate(op._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        if position < len(args):
            yield from _tensors([args[position]])
        elif argument.name in kwargs:
            yield from _tensors([kwargs[argument.name]])


Kernel = Callable[..., Any]


def kernel_for(machine: Machine, name: str, kind: Kind) -> Kernel:
    """A dispatcher kernel for ``aten::name``; ``name`` with its overload."""
    packet, _, overload = name.partition(".")

    @functools.cache
    def operator() -> Operator:
        overloads = getattr(torch.ops.aten, packet)
        return cast(Operator, getattr(overloads, overload or "default"))

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return run(machine, operator(), kind, args, kwargs)

    return kernel
