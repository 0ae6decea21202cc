"""transformers, and every trainer built on its Trainer: TRL, LLaMA-Factory, Axolotl,
ms-swift. With SSDTRAIN set, `OffloadCallback` is among the default callbacks.

    SSDTRAIN=fit trl sft ...
    SSDTRAIN=16GB llamafactory-cli train x.yaml
    SSDTRAIN=fit accelerate launch train.py
"""

from types import ModuleType
from typing import Any

from ssdtrain import switch
from ssdtrain.errors import ConfigError
from ssdtrain.integrations import check_trainer_version

CALLBACKS = "DEFAULT_CALLBACKS"


class Default:
    """What transformers calls for each new Trainer, as it calls a callback's class."""

    def __new__(cls) -> Any:
        """An `OffloadCallback` with the settings of SSDTRAIN. Its import is heavy, so
        it waits for a Trainer."""
        from ssdtrain.train.callback import OffloadCallback

        return OffloadCallback(switch.asked())


def imported(module: ModuleType) -> None:
    """Add the callback to the defaults of `transformers.trainer`, just imported. Raises
    ConfigError: SSDTRAIN is misspelt, or these are not the defaults that we know."""
    if switch.asked() is None:
        return
    check_trainer_version("transformers")
    defaults = getattr(module, CALLBACKS, None)
    if not isinstance(defaults, list):
        raise ConfigError(
            f"SSDTRAIN adds a callback to transformers.trainer.{CALLBACKS}, expects a "
            f"list, got {defaults!r}; unset SSDTRAIN and give the Trainer "
            "callbacks=[ssdtrain.OffloadCallback(...)]."
        )
    if Default not in defaults:
        defaults.append(Default)
