"""torchtitan: an override that offloads the model parts as their optimizers are built,
materialized and parallelized.

    --override.imports \\
        'ssdtrain.integrations.torchtitan.offload={"device_memory":"fit"}'
    activation_checkpoint:none
"""

from dataclasses import dataclass
from typing import Any

from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import derive, override

import ssdtrain
from ssdtrain.config import OffloadConfig
from ssdtrain.errors import AttachError
from ssdtrain.integrations import check_trainer_version

CHECKPOINTED = "CheckpointWrapper"
"""torch's class around a module that is computed again in backward."""


@override(  # type: ignore[untyped-decorator]
    target=OptimizersContainer.Config, description="ssdtrain offloads activations"
)
def offload(cfg: Any, **settings: Any) -> Any:
    """The same optimizers, which offload the model parts that they are built for.

    Args:
        cfg: what torchtitan would build.
        settings: fields of `OffloadConfig`.

    Raises:
        ConfigError: a setting can never work, or torchtitan has another version.
    """
    check_trainer_version("torchtitan")
    parsed = OffloadConfig.from_mapping(settings)
    owner: Any = type(cfg)._owner

    class Offloading(owner):  # type: ignore[misc]
        """`owner`, and a session on its model parts."""

        @dataclass(kw_only=True, slots=True)
        class Config(type(cfg)):  # type: ignore[misc]
            """That of `owner`."""

        def __init__(self, config: Any, *, model_parts: list[Any], **more: Any) -> None:
            _refuse_checkpointing(model_parts)
            super().__init__(config, model_parts=model_parts, **more)
            self.offloading = ssdtrain.offload(model_parts, parsed)

    return derive(cfg, Offloading.Config)


def _refuse_checkpointing(model_parts: list[Any]) -> None:
    for part in model_parts:
        for name, module in part.named_modules():
            if type(module).__name__ == CHECKPOINTED:
                raise AttachError(
                    "ssdtrain decides what is computed again, so it expects no "
                    f"activation checkpointing, got it around {name!r}; set "
                    "activation_checkpoint:none at the end of the command line."
                )
