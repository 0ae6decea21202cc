"""Says once, and why, that a session does nothing.

Loops of others may run another object than the one that was offloaded, on another
device, or save nothing that could move. Silence would look like success.
(tests/ssdtrain/engines/test_watch.py)
"""

import functools
import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ssdtrain.counters import StepReport
from ssdtrain.engines.meshes import ranks_of
from ssdtrain.engines.patch import Patches, weakly
from ssdtrain.engines.recognition import Own, device_of
from ssdtrain.errors import AttachError

logger = logging.getLogger(__name__)

NUM_STEPS = 3
"""Optimizer steps without a forward, or settled steps without a moved tensor."""
HELD = (
    f"no step is reported or planned: in {NUM_STEPS} optimizer steps every forward "
    "began while saved tensors of an earlier one were alive, such as those of a loss "
    "that is kept without a backward; evaluate under torch.no_grad(), keep loss.item()"
)


NUM_FORWARDS = 10
"""So many forwards without any backward are no gradient accumulation."""
_attached: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
"""Roots of open sessions, to tell of sessions inside one another."""


def checkpointed(modules: Iterable[nn.Module]) -> str | None:
    """Return the class of a module whose gradient checkpointing, as transformers and
    diffusers know it, is on; None: there is none."""
    for root in modules:
        for module in nn.Module.modules(root):
            if vars(module).get("gradient_checkpointing") is True and module.training:
                return type(module).__name__
    return None


class IdleMonitor:
    """Of one session."""

    def __init__(
        self,
        modules: list[nn.Module],
        device: torch.device,
        why: Callable[[StepReport], str | None],
        has_saved: Callable[[], bool],
        patches: Patches,
    ) -> None:
        """Watch from now on.

        Args:
            modules: none where a framework moves their parameters about.
            device: of the session.
            why: the reason that nothing moves; None: that is as it should be.
            has_saved: whether a saved tensor was ever large enough.
            patches: undone when the session is closed.
        """
        self._has_saved = has_saved
        self._modules = modules
        self._device = device
        self._why = why
        self._own = Own(modules)
        self._ranks = ranks_of(modules)
        self._num_forwards = 0
        self._num_transformed = 0
        self._num_stepped = 0
        self._num_idle: int | None = 0
        """Settled steps in which nothing moved; None: something has."""
        self._has_told = False
        self.told = ""
        """Why the session does little or nothing, once that is known."""
        self._num_held = 0
        """Optimizer steps, and one, that began so since a step has ended."""
        self._held_at: int | None = None
        self._claim(modules, patches)
        # torch's hook would keep a session alive that nobody closed.
        hook = register_optimizer_step_post_hook(weakly(self._stepped))
        patches.also(hook.remove)

    def forward_begins(self, *, transformed: bool = False) -> None:
        """A forward of the model is about to run; transformed: by torch.func.

        Raises:
            AttachError: the model has moved to another device, or has been sharded,
                since `offload`.
        """
        self._num_forwards += 1
        self._num_transformed += transformed
        if self._num_forwards == NUM_FORWARDS and not self._is_trained():
            self._hint(
                f"{NUM_FORWARDS} forwards were recorded for autograd, and no backward "
                "has asked for what they saved; evaluate under torch.no_grad(), and "
                "call backward() on a loss that came from this model"
            )
        if self._num_forwards > 1 or not self._modules:
            return
        now = device_of(self._modules)
        if now.type != self._device.type or (
            None not in (now.index, self._device.index) and now != self._device
        ):
            raise AttachError(
                f"the model was on {self._device} when offload() was called and is on "
                f"{now} now; call offload() after .to(...), accelerator.prepare(...) "
                "and whatever else moves it."
            )
        if (name := checkpointed(self._modules)) is not None:
            self._hint(
                f"gradient checkpointing is on in {name}, so its layers run again in "
                "backward and little is left for ssdtrain to move; switch it off "
                "(gradient_checkpointing=False in TrainingArguments, or "
                "leave out gradient_checkpointing_enable()) and set "
                "device_memory='fit': ssdtrain runs layers again where that is needed"
            )
        if ranks_of(self._modules) - self._ranks:
            raise AttachError(
                "the model was spread over more ranks after offload() (fully_shard, "
                "parallelize_module, DistributedDataParallel inside of it), and they "
                "would plan apart; call offload() after that."
            )

    def _is_trained(self) -> bool:
        """Whether a backward has been seen, or gradients that one has left."""
        weights = (p for module in self._modules for p in module.parameters())
        seen = self._num_stepped > 0 or self._has_saved() or not self._modules
        return seen or any(weight.grad is not None for weight in weights)

    def _claim(self, modules: Iterable[nn.Module], patches: Patches) -> None:
        """Note the roots of this session, and tell of others around or inside them."""
        for root in modules:
            inside = set(nn.Module.modules(root))
            for other in list(_attached):
                if other is not root and (
                    other in inside or root in nn.Module.modules(other)
                ):
                    outer, inner = (root, other) if other in inside else (other, root)
                    self._hint(
                        f"two sessions are open, on a {type(outer).__name__} and on a "
                        f"{type(inner).__name__} inside of it; what the inner one's "
                        "forward saves is the inner one's alone, and no plan of the "
                        "outer one counts it; close one of them"
                    )
            _attached.add(root)
            patches.also(functools.partial(_attached.discard, root))

    def _hint(self, why: str) -> None:
        """Say once what keeps the session from doing more."""
        logger.warning("ssdtrain: %s.", why)
        self.told = self.told or why

    @property
    def sees_nothing(self) -> bool:
        """Whether the model is trained, and nothing that it saves is large enough."""
        trained = self._num_stepped >= NUM_STEPS and self._num_forwards > 0
        return trained and not self._has_saved()

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._has_told or self._num_idle is None:
            return
        self._num_stepped += self._own.trains(optimizer)
        if self._num_stepped < NUM_STEPS or self._has_saved():
            return
        if self._num_forwards and self._num_forwards == self._num_transformed:
            self._tell(
                "a transform of torch.func ran every forward, and those allow no "
                "saved-tensor hooks; take gradients with backward() instead"
            )
            return
        if self._num_forwards:
            self._tell(
                "no tensor that autograd saved was large enough; set min_bytes lower "
                "to move small ones"
            )
            return
        names = ", ".join(sorted({type(module).__name__ for module in self._modules}))
        self._tell(
            f"{NUM_STEPS} optimizer steps are over, and no forward of the {names} that "
            "offload() was given has run; pass the object that the loop calls, such as "
            "what DistributedDataParallel, accelerator.prepare or torch.compile "
            "returned"
        )

    def _tell(self, why: str) -> None:
        if not self._has_told:
            self._has_told = True
            self._hint(f"nothing is offloaded: {why}")

    def forward_is_held(self, progress: int) -> None:
        """A forward begins while saved tensors of an earlier one are alive, at a time
        that only optimizer steps change."""
        if progress == self._held_at:
            return
        self._held_at = progress
        self._num_held += 1
        if self._num_held == NUM_STEPS + 1:  # as many optimizer steps lie between
            logger.warning("ssdtrain: %s.", HELD)

    def is_released(self) -> None:
        """A step ends, or a forward begins and no saved tensor is alive."""
        self._held_at, self._num_held = None, 0

    @property
    def is_held(self) -> bool:
        """Whether steps have stopped ending, for long enough to tell."""
        return self._num_held > NUM_STEPS

    def step_ended(self, report: StepReport) -> None:
        """A report was built."""
        if self._num_idle is None:
            return
        if report.bytes_offloaded or report.bytes_recomputed:
            self._num_idle = None
            return
        why = self._why(report)
        if why is None:
            return
        self._num_idle += 1
        if self._num_idle == NUM_STEPS:
            self._tell(why)
