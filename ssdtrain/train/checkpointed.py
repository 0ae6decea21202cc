"""Where a trainer's own checkpointing or offloading meets ours."""

import logging
from collections.abc import Mapping
from typing import Any

from ssdtrain.config import OffloadConfig, PlanChoice, Recompute
from ssdtrain.errors import AttachError

SWIFT = "activation_cpu_offload"
"""The callback of ms-swift that offloads."""
logger = logging.getLogger(__name__)


def refuse_offloading(args: Any) -> None:
    """Refuse a `TrainingArguments` whose trainer moves saved tensors itself. Raises
    AttachError: both would move them; says which setting to leave out."""
    nested = getattr(args, "activation_checkpointing_kwargs", None)
    nested = nested if isinstance(nested, Mapping) else {}
    callbacks = getattr(args, "callbacks", None) or ()  # ms-swift's names
    given = {
        f"callbacks={SWIFT!r}": SWIFT in callbacks,
        "activation_offloading": getattr(args, "activation_offloading", False),
        "activation_checkpointing_kwargs['offload']": nested.get("offload", False),
    }
    for name, value in given.items():
        if value:
            raise AttachError(
                "ssdtrain offloads what the forward saves, so it expects the trainer "
                f"not to do so as well, got {name}={value!r}; leave it out, or leave "
                "ssdtrain out."
            )


def take_over(model: Any, settings: OffloadConfig) -> bool:
    """Switch off the checkpointing of a transformers model where a plan decides by a
    goal in memory, or repeated modules run again anyway. Elsewhere say that it is on.
    Returns True: it was on, and is off now."""
    if not is_checkpointing(model):
        return False
    has_goal = settings.wanted_memory is not None or settings.memory_budget is not None
    plans = settings.plan == PlanChoice.AUTO.value and has_goal
    off = getattr(model, "activation_checkpointing_disable", None) or getattr(
        model, "gradient_checkpointing_disable", None
    )
    if off is None or not (plans or settings.recompute is Recompute.REGIONS):
        logger.warning(
            "ssdtrain: the trainer's activation checkpointing is on, so little is left "
            "to offload. Set device_memory or memory_budget: ssdtrain then "
            "decides what is computed again. Or set gradient_checkpointing=False."
        )
        return False
    off()
    if is_checkpointing(model):
        raise AttachError(
            "ssdtrain asked the model to stop its activation checkpointing, and it is "
            "still on; set gradient_checkpointing=False."
        )
    logger.warning(
        "ssdtrain: activation checkpointing is switched off; the plan decides what is "
        "computed again, within the memory that you set."
    )
    return True


def is_checkpointing(model: Any) -> bool:
    """Whether any module of a transformers model checkpoints its forward."""
    modules = model.modules() if hasattr(model, "modules") else ()
    return any(
        getattr(each, "gradient_checkpointing", False) is True for each in modules
    )
