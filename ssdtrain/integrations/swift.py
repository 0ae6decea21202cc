"""ms-swift: a callback that a plugin file registers and the command line names.

# offload_plugin.py
from ssdtrain.integrations.swift import register
register(device_memory="fit")

swift sft --external_plugins offload_plugin.py --callbacks ssdtrain ...

Or SSDTRAIN=fit swift sft ...
"""

from types import ModuleType
from typing import TYPE_CHECKING, Any

from ssdtrain import switch
from ssdtrain.config import OffloadConfig, OffloadOptions, with_options
from ssdtrain.errors import AttachError
from ssdtrain.integrations import check_trainer_version, transformers

if TYPE_CHECKING:
    from typing_extensions import Unpack

CALLBACK = "ssdtrain"


def imported(module: ModuleType) -> None:
    """Add the callback to the defaults that `swift.trainers.patcher`, just imported,
    has put in the place of transformers' own. Raises ConfigError: as there."""
    if switch.asked() is not None:
        check_trainer_version("ms-swift")
        transformers.imported(module.trainer)


@with_options
def register(
    config: OffloadConfig | None = None, **overrides: "Unpack[OffloadOptions]"
) -> None:
    """Let `--callbacks ssdtrain` mean `OffloadCallback` with these settings.

    Args:
        config: settings; None means defaults.
        overrides: fields of `OffloadConfig`, on top of `config`.

    Raises:
        ConfigError: a setting can never work, SSDTRAIN is set as well, or ms-swift has
            another version.
    """
    check_trainer_version("ms-swift")
    switch.refuse_plugin("ms-swift")
    settings = OffloadConfig.merged(config, overrides)

    from swift.callbacks import callbacks_map
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from ssdtrain.train.callback import OffloadCallback

    made: list[OffloadCallback] = []

    def callback(args: Any, trainer: Any) -> OffloadCallback:
        made.append(OffloadCallback(settings))
        return made[-1]

    def first_step(*_: Any) -> None:
        if not made:
            raise AttachError(
                "ms-swift trains, but its trainer did not ask for the callback that "
                f"the plugin registered; add --callbacks {CALLBACK}, or leave it out."
            )

    callbacks_map[CALLBACK] = callback
    register_optimizer_step_pre_hook(first_step)
