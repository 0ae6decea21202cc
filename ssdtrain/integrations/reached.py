"""Says so where SSDTRAIN is set and a loop trains that no hook reached."""

import sys
import warnings
from types import ModuleType
from typing import Any

from ssdtrain import switch


def imported(module: ModuleType) -> None:
    """Look once, at the first optimizer step of the process; `module`:
    `torch.optim.optimizer`, just imported."""

    waits = [True]  # torch lets no hook remove itself

    def first_step(*_: Any) -> None:
        if not waits:
            return
        waits.clear()
        value = switch.text()
        # Every session, and every callback of ours, needs it.
        if value is not None and "ssdtrain.api" not in sys.modules:
            warnings.warn(
                f"SSDTRAIN={value!r} is set, but this training reached none of the "
                "trainers that ssdtrain adds itself to (transformers and what is built "
                "on it, Lightning), so nothing is offloaded. Call "
                "ssdtrain.offload(model) in the script, or unset SSDTRAIN.",
                RuntimeWarning,
                stacklevel=2,
            )

    module.register_optimizer_step_pre_hook(first_step)
