"""DeepSpeed: ZeRO engines and the pipeline engine.

The pipeline schedule is read, not copied. `_exec_schedule` is wrapped on the instance
to list the schedule's steps first; a schedule can be iterated again. The functions of
`_INSTRUCTION_MAP` are wrapped on the instance, and give the hints of Algorithm 5.1
around each instruction.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ssdtrain.engines.hints import Hints, Stage
from ssdtrain.engines.megatron import Megatron, is_megatron
from ssdtrain.engines.patch import Patches, check_parameters
from ssdtrain.engines.plain import Plain
from ssdtrain.errors import AttachError
from ssdtrain.plan.agree import Peers

logger = logging.getLogger(__name__)

TESTED_VERSIONS = ("0.19.6", "0.19.8")
COMMUNICATION = ("SendActivation", "RecvActivation", "SendGrad", "RecvGrad")
EXPECTED_PARAMETERS = {
    "_exec_schedule": "pipe_schedule",
    "_exec_forward_pass": "buffer_id",
    "_exec_backward_pass": "buffer_id",
}


class DeepSpeed(Plain):
    """An engine of DeepSpeed, around any module, Megatron's too."""

    moves_weights = True

    def __init__(self, engine: nn.Module) -> None:
        self._engine: Any = engine
        module: Any = engine.module
        super().__init__([module])
        inner = Megatron if is_megatron(self.modules) else Plain
        self._inner = inner(self.modules)

    @classmethod
    def of(cls, model: Any) -> "DeepSpeed | None":
        """The engine, if it is one; does not import DeepSpeed."""
        kinds = type(model).__mro__
        is_engine = any(
            kind.__name__ == "DeepSpeedEngine"
            and kind.__module__.startswith("deepspeed")
            for kind in kinds
        )
        return cls(model) if is_engine else None

    def progress(self, patches: Patches) -> Callable[[], int]:
        """The engine's own count of optimizer steps."""
        return lambda: int(self._engine.global_steps)

    def peers(self, alone: Callable[[], None]) -> Peers:
        """Those of the module inside."""
        return self._inner.peers(alone)

    def attach(
        self, hints: Hints, patches: Patches, keep: Callable[[Tensor], None]
    ) -> None:
        """Read a pipeline's schedule; under ZeRO the module's forward is all."""
        kinds = type(self._engine).__mro__
        if any(kind.__name__ == "PipelineEngine" for kind in kinds):
            attach_pipeline(self._engine, hints, patches)
        else:
            self._inner.attach(hints, patches, keep)


def check(engine: Any) -> None:
    """Refuse an engine whose internals are not the ones we patch.

    Raises:
        AttachError: names the version met and the versions tested.
    """
    for name, expected in EXPECTED_PARAMETERS.items():
        check_parameters(
            engine, name, expected, package="deepspeed", tested=TESTED_VERSIONS
        )
    if not isinstance(getattr(engine, "_INSTRUCTION_MAP", None), dict):
        raise AttachError(
            "this DeepSpeed's PipelineEngine has no _INSTRUCTION_MAP; tested "
            f"versions: {', '.join(TESTED_VERSIONS)}. Install one of them."
        )


def attach_pipeline(engine: Any, hints: Hints, patches: Patches) -> None:
    """Give the hints of Algorithm 5.1 around every pipeline instruction.

    Raises:
        AttachError: an unknown DeepSpeed.
    """
    check(engine)
    warn_of_checkpointing(engine.module)
    patches.mark(engine)
    schedule = _Schedule(hints)
    run = engine._exec_schedule
    wrapped = {
        kind: schedule.around(kind.__name__, function)
        for kind, function in engine._INSTRUCTION_MAP.items()
    }

    @functools.wraps(run)
    def _exec_schedule(pipe_schedule: Any) -> Any:
        schedule.begin([cmd for step in pipe_schedule.steps() for cmd in step])
        result = run(pipe_schedule)
        hints.step_end()
        return result

    patches.set(engine, "_INSTRUCTION_MAP", wrapped)
    patches.set(engine, "_exec_schedule", _exec_schedule)


def warn_of_checkpointing(module: Any) -> None:
    """DeepSpeed's own checkpointing keeps the inputs of its regions on a context or in
    a closure, where saved-tensor hooks do not see them."""
    function = getattr(module, "activation_checkpoint_func", None)
    theirs = getattr(function, "__module__", "").startswith("deepspeed")
    if getattr(module, "activation_checkpoint_interval", 0) and theirs:
        logger.warning(
            "ssdtrain: the inputs that DeepSpeed's activation checkpointing keeps stay "
            "on the device; pass activation_checkpoint_func=functools.partial("
            "torch.utils.checkpoint.checkpoint, use_reentrant=False) to "
            "PipelineModule, and they can be offloaded."
        )


class _Schedule:
    """The instructions of one batch, each with its micro-batch.

    Instructions carry buffer ids only; micro-batches go forward, and come back, in
    order, so counting them names them.
    """

    def __init__(self, hints: Hints) -> None:
        self._hints = hints
        self._plan: list[tuple[Stage, int | None]] = []
        self._at = 0

    def begin(self, commands: list[Any]) -> None:
        """A new batch."""
        counts = {Stage.FORWARD: 0, Stage.BACKWARD: 0}
        self._plan, self._at = [], 0
        for command in commands:
            stage = _stage_of(type(command).__name__)
            micro_batch = counts.get(stage)
            if micro_batch is not None:
                counts[stage] = micro_batch + 1
            self._plan.append((stage, micro_batch))

    def around(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap one entry of the instruction map (called with the engine first)."""
        stage = _stage_of(kind)
        hints = self._hints

        @functools.wraps(function)
        def run(engine: Any, **kwargs: Any) -> Any:
            micro_batch = self._announce()
            if stage is Stage.COMMUNICATION:
                hints.prefetch_last_module()
            if stage is Stage.FORWARD:
                # The whole instruction: the loss and its saved logits are inside.
                with hints.forward(micro_batch=micro_batch):
                    return function(engine, **kwargs)
            result = function(engine, **kwargs)
            if stage is Stage.BACKWARD:
                hints.wait_io()
            return result

        return run

    def _announce(self) -> int | None:
        """Tell this stage and the next pass; the micro-batch of this one."""
        stage, micro_batch = self._plan[self._at]
        self._at += 1
        self._hints.set_stage(stage, micro_batch=micro_batch)
        for following, its_micro_batch in self._plan[self._at :]:
            if following not in (Stage.COMMUNICATION, Stage.OTHER):
                self._hints.set_next_stage(following, micro_batch=its_micro_batch)
                break
        return micro_batch


def _stage_of(kind: str) -> Stage:
    if kind in COMMUNICATION:
        return Stage.COMMUNICATION
    return {
        "ForwardPass": Stage.FORWARD,
        "BackwardPass": Stage.BACKWARD,
        "OptimizerStep": Stage.OPTIMIZER,
    }.get(kind, Stage.OTHER)
