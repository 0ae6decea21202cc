"""Captures the execution graph of a training step while it really runs on this machine:
under `torch.compile`, over several ranks, driven by DeepSpeed or Megatron-Core, with
whatever optimizer. Every rank captures its own graph.

[Note: steps that run]
Forward, backward and update are told apart by what runs: autograd's engine is at work
in backward; an update is what an optimizer's step does, or what runs without gradients
after the last backward and outside of every module. Collectives are noted with their
bytes and their group's size; a send and its receive carry one name, so that graphs of
several ranks can be simulated together. Compiled regions run compiled: their generated
kernels are seen by the calls that the generated code makes. A CUDA graph's replay shows
nothing of itself.
(tests/ssdtrain/tools/foresight/test_steps.py, test_real_ranks.py)
"""

import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ssdtrain.errors import ConfigError
from ssdtrain.tools.foresight.collectives import Collective
from ssdtrain.tools.foresight.graph import Graph, Node, Stream
from ssdtrain.tools.foresight.overheads import StepPhase
from ssdtrain.tools.foresight.recorder import UPDATE_VIEWS, Noted, Recorder, local

NUM_WARM = 2
"""Steps before the captured one: compilers compile, buckets settle."""
# Collectives by what their operators' names contain, the longer names first.
KINDS: Mapping[str, Collective] = {
    "reduce_scatter": Collective.REDUCE_SCATTER,
    **dict.fromkeys(("allreduce", "all_reduce"), Collective.ALL_REDUCE),
    **dict.fromkeys(("allgather", "all_gather"), Collective.ALL_GATHER),
    **dict.fromkeys(("alltoall", "all_to_all"), Collective.ALL_TO_ALL),
    # As long as one rank's bytes take, whoever they go to.
    **dict.fromkeys(("broadcast", "scatter", "gather", "reduce"), Collective.SEND),
    **dict.fromkeys(("send", "recv"), Collective.SEND),
}
NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional")
NO_WORK = ("barrier", "monitored_barrier_", "wait_tensor", "_wrap_tensor_autograd")
# Kernels that `fully_shard` runs on its own streams.
PACKING = ("fsdp::all_gather_copy_in", "fsdp::chunk_cat")
# What inductor calls its kernels in generated code.
GENERATED = ("triton_", "cpp_fused")


def capture_step(
    step: Callable[[], Any],
    models: nn.Module | Sequence[nn.Module],
    *,
    num_warm: int = NUM_WARM,
    notes: Mapping[str, str] | None = None,
) -> Graph:
    """Run a whole training step some times and capture the last one. See [Note: steps
    that run]. `models`: the module, engine or chunks of this rank. Raises ConfigError:
    nothing was seen of the step."""
    model = models if isinstance(models, nn.Module) else nn.ModuleList(models)
    for _ in range(num_warm):
        step()
    phases = _Phases()
    recorder = Recorder(model, amend=_Amender(phases).amend, runs_compiled=True)
    phases.recorder = recorder
    with ExitStack() as stack:
        stack.enter_context(recorder.modules())
        stack.enter_context(phases.optimizers())
        stack.enter_context(generated_kernels(recorder, phases))
        stack.enter_context(recorder)
        step()
    if not recorder.num_nodes:
        raise ConfigError(
            "no operator was seen in the step; CUDA graphs show none: capture the "
            "step without them."
        )
    found = {"captured": "from a step that ran", **(notes or {})}
    if not hasattr(TorchDispatchMode, "ignore_compile_internals"):
        why = f"ran eagerly: torch {torch.__version__} asks for it"
        found["compiled_regions"] = why
    return recorder.graph(found)


class _Phases:
    """Tells which phase an operator belongs to."""

    recorder: Recorder

    def __init__(self) -> None:
        self._is_updating = False
        self._is_behind = False
        """A backward has run."""
        self._perhaps: list[int] = []
        """Operators that are an update's unless another backward follows: compiled
        forwards, too, run without gradients and outside of modules."""

    @contextmanager
    def optimizers(self) -> Iterator[None]:
        """Follow every optimizer's step."""

        def begin(*_: Any) -> None:
            self._is_updating = True

        def end(*_: Any) -> None:
            self._is_updating = False

        with ExitStack() as stack:
            stack.callback(register_optimizer_step_pre_hook(begin).remove)
            stack.callback(register_optimizer_step_post_hook(end).remove)
            yield

    def present(self) -> StepPhase:
        """The phase of what runs now."""
        if torch._C._current_graph_task_id() != -1:
            self._is_behind = True
            if self._perhaps:
                self.recorder.rephase(self._perhaps, StepPhase.FORWARD)
                self._perhaps = []
            return StepPhase.BACKWARD
        if self._is_updating:
            return StepPhase.UPDATE
        outside = not torch.is_grad_enabled() and not self.recorder.module
        if self._is_behind and outside:
            self._perhaps.append(self.recorder.num_nodes)
            return StepPhase.UPDATE
        return StepPhase.FORWARD


class Collectives:
    """Says of collectives what their schemas do not: bytes, groups, partners."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def amend(
        self, func: Any, arguments: tuple[Any, Any], noted: Noted
    ) -> Noted | None:
        """Other operators stay as they are; None: nothing moves."""
        namespace, _, name = noted.node.name.partition("::")
        if namespace not in NAMESPACES:
            return noted
        if name in NO_WORK:
            return None
        kind = next((k for word, k in KINDS.items() if word in name), None)
        if kind is None:
            raise ConfigError(f"execution graphs do not know {func._schema.name} yet")
        named = _named(func, arguments)
        given, made = _ends(name, named, noted)
        size, peers = _group(named)
        num_bytes = max(sum(x.nbytes for x in given), sum(x.nbytes for x in made))
        attr: dict[str, Any] = {"num_bytes": num_bytes, "collective": kind.value}
        attr["ranks"] = size
        if name.startswith(("send", "recv")):
            attr |= self._passed(name, named, peers)
        else:
            key = f"{name}/{','.join(map(str, peers))}"
            self._counts[key] += 1
            attr["group"] = f"{key}/{self._counts[key]}"
        if name.startswith("recv"):
            attr["num_bytes"] = 0  # the send has them
            given = []
        node = replace(noted.node, stream=Stream.COMMUNICATION, attr=attr)
        return Noted(node, given, made)

    def _passed(
        self, name: str, named: Mapping[str, Any], peers: Sequence[int]
    ) -> dict[str, Any]:
        """The name that a send and its receive share."""
        own = dist.get_rank()
        other = named.get("dst", named.get("src", 0))
        other = peers[other] if other < len(peers) else other
        pair = (own, other) if name.startswith("send") else (other, own)
        key = f"send/{pair[0]}/{pair[1]}"
        self._counts[key] += 1
        word = "signal" if name.startswith("send") else "waits_for"
        return {word: f"{key}/{self._counts[key]}"}


class _Amender:
    """Says of operators what their schemas do not: phases, collectives, copies."""

    def __init__(self, phases: _Phases) -> None:
        self._phases = phases
        self._collectives = Collectives()

    def amend(
        self, func: Any, arguments: tuple[Any, Any], noted: Noted
    ) -> Noted | None:
        """See [Note: steps that run]."""
        node = replace(noted.node, phase=self._phases.present())
        noted = noted._replace(node=node)
        if node.name.partition("::")[0] in NAMESPACES:
            return self._collectives.amend(func, arguments, noted)
        if node.name in PACKING:
            if node.name == PACKING[0]:  # a rank's shards are there before the step
                noted = noted._replace(read=())
            node = replace(node, stream=Stream.COMMUNICATION)
            return noted._replace(node=node, may_view=False)
        if node.name.startswith("aten::_fused_") and node.phase is StepPhase.UPDATE:
            tensors = len(arguments[0][0])
            views = {"tensors": tensors, "host_views": UPDATE_VIEWS * tensors}
            return noted._replace(node=replace(node, attr={**node.attr, **views}))
        return self._copied(noted)

    def _copied(self, noted: Noted) -> Noted:
        """A copy between device and host has a queue of its own."""
        devices = {x.device.type for x in (*noted.read, *noted.written)}
        if "copy" not in noted.node.name or not {"cuda", "cpu"} <= devices:
            return noted
        target = noted.written[0] if noted.written else noted.read[0]
        out = target.device.type == "cpu"
        attr = {**noted.node.attr, "num_bytes": target.nbytes}
        stream = Stream.COPY_OUT if out else Stream.COPY_IN
        return noted._replace(node=replace(noted.node, stream=stream, attr=attr))


def _named(func: Any, arguments: tuple[Any, Any]) -> dict[str, Any]:
    args, kwargs = arguments
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _tensors(value: Any) -> list[Tensor]:
    return [local(x) for x in tree_leaves(value) if isinstance(x, Tensor)]


def _ends(
    name: str, named: Mapping[str, Any], noted: Noted
) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors that a collective reads, and those that it writes."""
    outs = [value for key, value in named.items() if key.startswith("output")]
    ins = [value for key, value in named.items() if key.startswith("input")]
    if outs:
        return _tensors(ins), _tensors(outs)
    read = _tensors([noted.read])
    made = [x for x in _tensors([noted.written]) if all(x is not y for y in read)]
    if name.startswith("send"):
        return read, []
    return read, made or read  # in place, unless it gives something new


def _group(named: Mapping[str, Any]) -> tuple[int, Sequence[int]]:
    """Size and ranks of a collective's group."""
    group: Any = named.get("process_group", named.get("group_name"))
    if isinstance(group, str):
        resolve: Any = torch._C._distributed_c10d._resolve_process_group
        group = resolve(group)
    elif isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    if group is None:
        return 1, (0,)
    try:
        return group.size(), dist.get_process_group_ranks(group)
    except KeyError:  # a group of torch's own, such as a mesh's copy
        return group.size(), range(group.size())


# -- generated kernels ----------------------------------------------------------------


class _Kernel:
    """Stands in for a kernel in a generated module; runs it and notes its tensors."""

    def __init__(self, inner: Any, notice: Callable[[Sequence[Any]], None]) -> None:
        self._inner = inner
        self._notice = notice

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._notice(args)
        return self._inner(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Launch a Triton kernel."""
        self._notice(args)
        return self._inner.run(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@contextmanager
def generated_kernels(recorder: Recorder, phases: _Phases) -> Iterator[None]:
    """Note the kernels that inductor's generated modules call."""
    inductor: Any = sys.modules.get("torch._inductor.codecache")
    modules = () if inductor is None else tuple(inductor.PyCodeCache.modules)
    replaced: list[tuple[Any, str, Any]] = []
    for module in modules:
        for name, kernel in list(vars(module).items()):
            if not name.startswith(GENERATED):
                continue
            roles = roles_of(kernel, name, module)

            def notice(
                args: Sequence[Any], name: str = name, roles: Sequence[str] = roles
            ) -> None:
                node = Node(
                    name=f"inductor::{name}",
                    phase=phases.present(),
                    inputs=(),
                    outputs=(),
                    module=recorder.module,
                )
                recorder.note(Noted(node, *_by_role(recorder, args, roles)))

            replaced.append((module, name, kernel))
            setattr(module, name, _Kernel(kernel, notice))
    try:
        yield
    finally:
        for module, name, kernel in replaced:
            setattr(module, name, kernel)


def roles_of(kernel: Any, name: str, module: Any) -> tuple[str, ...]:
    """Names of a generated kernel's arguments: `in_ptr0`, `in_out_ptr0`, `out_ptr0`..
    Raises ConfigError: the generated code is not written as in tested versions."""
    names = getattr(getattr(kernel, "fn", None), "arg_names", None)
    if names is not None:  # Triton
        return tuple(names)
    source = Path(inspect.getfile(module)).read_text(encoding="utf-8")
    found = re.search(rf"^{name} = .*?void\s+kernel\((.*?)\)", source, re.M | re.S)
    if found is None:
        raise ConfigError(
            f"the arguments of {name} are not found in the code that inductor "
            f"generated with torch {torch.__version__}"
        )
    return tuple(part.split()[-1].lstrip("*") for part in found[1].split(","))


def _by_role(
    recorder: Recorder, args: Sequence[Any], roles: Sequence[str]
) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors that a generated kernel reads, and those that it writes. One that is both
    and was never seen is a buffer that it fills first."""
    read, written = [], []
    for value, role in zip(args, roles, strict=False):
        if isinstance(value, Tensor):
            fills = role.startswith("in_out") and not recorder.has_seen(value)
            if not role.startswith("out_") and not fills:
                read.append(value)
            if role.startswith(("out_", "in_out")):
                written.append(value)
    return read, written
