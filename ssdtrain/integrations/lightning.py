"""Lightning and Fabric: entry points that give a callback only where SSDTRAIN is set.

    SSDTRAIN=fit python train.py

By hand: `lightning.Trainer(callbacks=[ssdtrain.LightningCallback(...)])`, and
`Fabric(callbacks=[FabricCallback(...)])`.
"""

from typing import Any

from ssdtrain import switch
from ssdtrain.config import OffloadConfig
from ssdtrain.errors import AttachError
from ssdtrain.integrations import check_trainer_version
from ssdtrain.train.attachment import Attachment


def trainer_callbacks() -> list[Any]:
    """What `lightning.pytorch` adds to each Trainer: nothing unless asked. Raises
    ConfigError: SSDTRAIN is misspelt, or Lightning has another version."""
    settings = _asked()
    if settings is None:
        return []
    from ssdtrain.train.lightning_callback import LightningCallback

    return [LightningCallback(settings)]


def fabric_callbacks() -> list[Any]:
    """What `lightning.fabric` adds to each Fabric: nothing unless asked. Raises
    ConfigError: SSDTRAIN is misspelt, or Lightning has another version."""
    settings = _asked()
    return [] if settings is None else [FabricCallback(settings)]


def _asked() -> OffloadConfig | None:
    settings = switch.asked()
    if settings is not None:
        check_trainer_version("lightning")
    return settings


class FabricCallback(Attachment):
    """Attaches `ssdtrain.offload` to the module that `Fabric.setup` prepares. Fabric
    tells no end: `close()` detaches, and so does the end of the process."""

    def on_after_setup(self, fabric: Any, module: Any) -> None:
        """Attach: the module is prepared and on its device. Raises AttachError: a
        second module that is trained; the text says what to do."""
        own = module.module
        if not any(each.requires_grad for each in own.parameters()):
            return
        if self.session is not None and self._of() not in (None, own):
            raise AttachError(
                "ssdtrain offloads one module for each Fabric, which set up a second "
                f"one to train, {type(own).__name__}; unset SSDTRAIN and call "
                "ssdtrain.offload([first, second]) with both."
            )
        self.attach(own)
