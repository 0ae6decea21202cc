"""Which engine runs the model that `offload` was given."""

from collections.abc import Callable
from typing import Any

from ssdtrain.engines.deepspeed import DeepSpeed
from ssdtrain.engines.megatron import Megatron
from ssdtrain.engines.plain import Plain
from ssdtrain.engines.recognition import checked_modules

ENGINES: tuple[Callable[[Any], Plain | None], ...] = (DeepSpeed.of, Megatron.of)
"""Each gives its engine, or None where the model is not its own. Asked in this order;
what nobody takes is plain. None of them imports its framework."""


def engine_of(model: Any) -> Plain:
    """The engine of a model.

    Raises:
        AttachError: there is no module in it; says what to pass.
    """
    for recognised in ENGINES:
        engine = recognised(model)
        if engine is not None:
            return engine
    return Plain(checked_modules(model))
