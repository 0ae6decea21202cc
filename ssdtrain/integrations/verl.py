"""verl: with SSDTRAIN set, its switch `model.enable_activation_offload` means ours.

    SSDTRAIN=fit python -m verl.trainer.main_ppo ... \\
        actor_rollout_ref.model.enable_activation_offload=True
"""

import inspect
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ssdtrain import switch
from ssdtrain.errors import AttachError, ConfigError
from ssdtrain.integrations import check_trainer_version

if TYPE_CHECKING:
    from ssdtrain.api import Session

FUNCTION = "enable_activation_offloading"
ARGUMENTS = ["model", "strategy", "enable_ckpt"]
STRATEGIES = ("fsdp2",)
SESSIONS: "list[Session]" = []
"""Of this worker, one for each model that it trains. They end with the process."""


def imported(module: ModuleType) -> None:
    """Put ours in the place of the function of `verl.utils.activation_offload`, just
    imported. Raises ConfigError: SSDTRAIN is misspelt, or verl has another function or
    version."""
    if switch.asked() is None:
        return
    check_trainer_version("verl")
    found = getattr(module, FUNCTION, None)
    arguments = [] if found is None else list(inspect.signature(found).parameters)
    if arguments != ARGUMENTS:
        raise ConfigError(
            f"ssdtrain knows verl's {FUNCTION}({', '.join(ARGUMENTS)}), got arguments "
            f"{arguments}; unset SSDTRAIN."
        )
    setattr(module, FUNCTION, enable_activation_offloading)


def enable_activation_offloading(
    model: Any, strategy: str, enable_ckpt: bool = False
) -> None:
    """Offload a model that verl has sharded as its `strategy` says; `enable_ckpt`:
    gradients are checkpointed as well. Raises AttachError: a strategy that hides which
    tensors are weights."""
    from ssdtrain.api import offload
    from ssdtrain.train.checkpointed import take_over

    if strategy not in STRATEGIES:
        raise AttachError(
            f"ssdtrain expects verl's strategy {' or '.join(STRATEGIES)}, got "
            f"{strategy!r}; set actor_rollout_ref.actor.strategy=fsdp2."
        )
    if not any(each.requires_grad for each in model.parameters()):
        return  # a reference model: it saves nothing
    settings = switch.asked()
    if enable_ckpt and settings is not None:
        take_over(model, settings)
    SESSIONS.append(offload(model, settings))
