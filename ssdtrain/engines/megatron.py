"""Megatron-Core: hints from `forward_step` and `backward_step` of its schedules.

All three schedules (no pipelining, 1F1B, interleaved) call these two functions of
`megatron.core.pipeline_parallel.schedules` by name, so replacing both in that module
reaches every loop, also one that fetched its schedule before. One `Router` serves all
sessions.

`forward_step` says which micro-batch of which chunk it runs. `backward_step` is only
given the output tensor that `forward_step` returned, the same Python object also after
`deallocate_output_tensor`: the lane is written on it. What comes next is read from the
same schedule's last run, whose order repeats.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn

from ssdtrain.engines.hints import Hints, Stage
from ssdtrain.engines.patch import Patches, Shared, check_parameters
from ssdtrain.engines.peers import peers_of
from ssdtrain.engines.plain import Plain, chunk_name
from ssdtrain.engines.recognition import called_of, given
from ssdtrain.errors import AttachError
from ssdtrain.plan.agree import Peers

TESTED_VERSIONS = ("0.16.1", "0.19.2")
SCHEDULES = "megatron.core.pipeline_parallel.schedules"
STATE = "megatron.core.parallel_state"
RANDOM = "megatron.core.tensor_parallel.random"
NEIGHBOURS = "megatron.core.pipeline_parallel.p2p_communication"
FORWARD = (
    "forward_step_func, data_iterator, model, num_microbatches, input_tensor, "
    "forward_data_store, config, cp_group_size, collect_non_loss_data, "
    "checkpoint_activations_microbatch, is_first_microbatch, current_microbatch, "
    "vp_stage, is_last_stage"
)
BACKWARD = (
    "input_tensor, output_tensor, output_tensor_grad, model_type, config",
    "input_tensor, output_tensor, output_tensor_grad, config",
)
REFUSED = {
    "gradient_accumulation_fusion": "its kernel looks for main_grad on the saved "
    "weight, and saved-tensor hooks give back a tensor without attributes; set "
    "gradient_accumulation_fusion=False",
    "overlap_moe_expert_parallel_comm": "it runs forward and backward of two "
    "micro-batches layer by layer, outside forward_step; set it to False",
    "fine_grained_activation_offloading": "only the innermost saved-tensor hooks run, "
    "so the two would move parts of one another's tensors; set it to False",
    "cpu_offloading": "only the innermost saved-tensor hooks run, so the two would "
    "move parts of one another's tensors; set it to False",
}
OUTPUT_MARK = "_ssdtrain_lane"


class ScheduleEvent(NamedTuple):
    """One forward or backward of a schedule."""

    stage: Stage
    chunk: int
    micro_batch: int


class OutputMark(NamedTuple):
    """Written on the output tensor of a forward."""

    schedule: "Schedule"
    chunk: int
    micro_batch: int


def innermost(module: Any) -> Any:
    """The model inside Megatron's wrappers (DDP, Float16Module)."""
    while isinstance(getattr(module, "module", None), nn.Module):
        module = module.module
    return module


def is_megatron(modules: Iterable[object]) -> bool:
    """Whether one of these is a (wrapped) MegatronModule; imports nothing."""
    return any(
        cls.__name__ == "MegatronModule" and cls.__module__.startswith("megatron.core")
        for module in modules
        for cls in type(innermost(module)).__mro__
    )


class Megatron(Plain):
    """Chunks of Megatron-Core, under any of its schedules."""

    @classmethod
    def of(cls, model: Any) -> "Megatron | None":
        """The engine of chunks; None: no MegatronModule is among them."""
        parts = given(model)
        if not all(isinstance(part, nn.Module) for part in parts):
            return None
        modules = [called for part in parts for called in called_of(part)]
        return cls(modules) if is_megatron(modules) else None

    def peers(self, alone: Callable[[], None]) -> Peers:
        """The tensor-parallel ranks, which wait for each other in every layer. All
        chunks are in one group of them."""
        state = import_module(STATE)
        if not (distributed.is_initialized() and state.model_parallel_is_initialized()):
            return Peers()
        group = state.get_tensor_model_parallel_group()
        return peers_of(distributed.get_process_group_ranks(group), alone)

    def attach(
        self, hints: Hints, patches: Patches, keep: Callable[[Tensor], None]
    ) -> None:
        """Let the schedules fill a lane for every micro-batch of every chunk."""
        for config in configs_of(self.modules):
            check_config(config)
        schedules = import_module(SCHEDULES)
        router: Router | None = Shared.at(schedules)
        if router is None:
            check_schedules(schedules)
            parts = import_module(RANDOM), import_module(NEIGHBOURS)
            router = Router(schedules, *parts)
        schedule = Schedule(self.modules, hints, keep)
        router.add(schedule)
        patches.also(functools.partial(router.remove, schedule))
        # Outside the schedules (a loop of one's own) a chunk is a plain module.
        super().attach(hints, patches, keep)


def check_schedules(schedules: Any) -> None:
    """Refuse a Megatron-Core whose internals are not the ones we replace.

    Raises:
        AttachError: names the version met and the versions tested.
    """
    for name, expected in (("forward_step", (FORWARD,)), ("backward_step", BACKWARD)):
        check_parameters(
            schedules, name, *expected, package="megatron-core", tested=TESTED_VERSIONS
        )


def check_config(config: Any) -> None:
    """Refuse settings that cannot work together with saved-tensor hooks.

    Raises:
        AttachError: names the setting, why, and what to set.
    """
    graphs = getattr(config, "cuda_graph_impl", None)
    if graphs not in (None, "none"):
        raise AttachError(
            f"megatron-core's cuda_graph_impl={graphs!r} cannot be offloaded: a "
            "captured graph replays without hooks; set cuda_graph_impl='none'."
        )
    for name, why in REFUSED.items():
        if getattr(config, name, False):
            raise AttachError(f"megatron-core's {name} cannot be offloaded: {why}.")


class Schedule:
    """One session's chunks as the schedules run them."""

    def __init__(
        self,
        modules: list[nn.Module],
        hints: Hints,
        keep: Callable[[Tensor], None],
    ) -> None:
        self._hints = hints
        self._keep = keep
        self._chunks = {id(innermost(m)): at for at, m in enumerate(modules)}
        self._events: list[ScheduleEvent] = []
        self._expected = 0
        self._orders: dict[int, list[ScheduleEvent]] = {}

    def chunk_of(self, model: Any) -> int | None:
        """Which of our chunks this is; None: somebody else's."""
        return self._chunks.get(id(innermost(model)))

    def forward(
        self, chunk: int, run: Callable[[], Any], arguments: dict[str, Any]
    ) -> Any:
        """`forward_step` of one micro-batch of one chunk."""
        micro_batch = arguments.get("current_microbatch")
        if not torch.is_grad_enabled() or micro_batch is None:
            return run()
        event = ScheduleEvent(Stage.FORWARD, chunk, micro_batch)
        if not self._events or event in self._events:
            self._begin(arguments["num_microbatches"])
        with self._hints.forward(micro_batch=micro_batch, chunk=chunk_name(chunk)):
            result = run()
        tensor = first_tensor(result[0])
        if tensor is not None:
            setattr(tensor, OUTPUT_MARK, OutputMark(self, chunk, micro_batch))
        self._done(event)
        return result

    def backward(self, lane: OutputMark, run: Callable[[], Any]) -> Any:
        """`backward_step` of a lane."""
        result = run()
        self._hints.wait_io()
        self._done(ScheduleEvent(Stage.BACKWARD, lane.chunk, lane.micro_batch))
        if len(self._events) == self._expected:
            self._end()
        return result

    def keep(self, outputs: Any) -> None:
        """Megatron empties these itself and fills them again in backward."""
        for tensor in outputs if isinstance(outputs, tuple) else (outputs,):
            if isinstance(tensor, Tensor):
                self._keep(tensor)

    def _begin(self, num_micro_batches: int) -> None:
        """A schedule starts. The last one may have been for its outputs alone."""
        self._events = []
        self._expected = 2 * num_micro_batches * len(self._chunks)
        self._hints.step_end()

    def _end(self) -> None:
        """Every forward has had its backward."""
        self._orders[self._expected] = self._events
        self._events = []
        self._hints.step_end()

    def _done(self, event: ScheduleEvent) -> None:
        """Tell what follows; load for it where a neighbour is waited for first."""
        self._events.append(event)
        order, at = self._orders.get(self._expected, []), len(self._events)
        if at >= len(order) or order[at - 1] != event:
            return
        following = order[at]
        self._hints.set_next_stage(
            following.stage,
            micro_batch=following.micro_batch,
            chunk=chunk_name(following.chunk),
        )
        if following[1:] != event[1:]:  # else nothing is waited for: all is here
            self._hints.prefetch_last_module()


class Router(Shared[Schedule]):
    """Stands in the schedules for `forward_step` and `backward_step`."""

    def __init__(
        self, schedules: ModuleType, random: ModuleType, neighbours: ModuleType
    ) -> None:
        super().__init__(schedules)
        self.replace(schedules, "forward_step", self._forward_step)
        self.replace(schedules, "backward_step", self._backward_step)
        for module, cls, name, wrap in (
            (random, "CheckpointWithoutOutput", "checkpoint", self._discarded),
            (neighbours, "P2PCommunicator", "_communicate", self._waiting),
        ):
            if hasattr(module, cls):
                self.replace(getattr(module, cls), name, wrap)

    def _owner_of(self, model: Any) -> tuple[Schedule, int] | None:
        for schedule in self.users:
            chunk = schedule.chunk_of(model)
            if chunk is not None:
                return schedule, chunk
        return None

    def _forward_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def forward_step(*args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind(*args, **kwargs).arguments
            owner = self._owner_of(arguments["model"])
            if owner is None:
                return original(*args, **kwargs)
            schedule, chunk = owner
            return schedule.forward(chunk, lambda: original(*args, **kwargs), arguments)

        return forward_step

    def _backward_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def backward_step(*args: Any, **kwargs: Any) -> Any:
            output = signature.bind(*args, **kwargs).arguments["output_tensor"]
            lane = getattr(first_tensor(output), OUTPUT_MARK, None)
            if lane is None or lane.schedule not in self.users:
                return original(*args, **kwargs)
            return lane.schedule.backward(lane, lambda: original(*args, **kwargs))

        return backward_step

    def _discarded(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """See [Note: discarded outputs]."""

        def checkpoint(*args: Any, **kwargs: Any) -> Any:
            outputs = original(*args, **kwargs)
            for schedule in self.users:
                schedule.keep(outputs)
            return outputs

        return checkpoint

    def _waiting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """See [Note: waiting for a neighbour]."""

        def communicate(communicator: Any, *args: Any, **kwargs: Any) -> Any:
            config = communicator.config
            if not (config.batch_p2p_comm and config.batch_p2p_sync):
                return original(communicator, *args, **kwargs)
            config.batch_p2p_sync = False
            try:
                received = original(communicator, *args, **kwargs)
            finally:
                config.batch_p2p_sync = True
            torch.cuda.current_stream().synchronize()
            return received

        return communicate


# [Note: waiting for a neighbour]
# After every exchange between stages Megatron waits for the whole device, because of a
# bug that torch had once (`batch_p2p_sync`), and so for our copies, which were to run
# beside the next micro-batch. The compute stream has waited for the exchange by then:
# waiting for it is enough. (tests/ssdtrain/megatron/test_host.py)


# [Note: discarded outputs]
# `CheckpointWithoutOutput` (selective recomputation of norms) gives an output to the
# next layer, which saves it, and then empties its storage with `resize_(0)`; a hook in
# backward fills the same storage again. A copy that has begun by then would read freed
# memory, and nothing is gained by one: such outputs stay where they are.
# (tests/ssdtrain/megatron/test_law.py, selective)


def first_tensor(output: Any) -> Tensor | None:
    """The tensor that a stage's output is told by."""
    while isinstance(output, (list, tuple, dict)):
        values = list(output.values()) if isinstance(output, dict) else output
        output = values[0] if values else None
    return output if isinstance(output, Tensor) else None


def configs_of(modules: list[nn.Module]) -> Iterator[Any]:
    """The configurations of all Megatron modules, each once."""
    seen: set[int] = set()
    for module in modules:
        for part in innermost(module).modules():
            config = getattr(part, "config", None)
            if config is not None and id(config) not in seen:
                seen.add(id(config))
                yield config
