"""One line in a stock Lightning script.

lightning.Trainer(..., callbacks=[LightningCallback(target="host")])
"""

from typing import Any

from lightning.pytorch.callbacks import Callback

from ssdtrain.train.attachment import Attachment


class LightningCallback(Attachment, Callback):  # type: ignore[misc]
    """Attaches `ssdtrain.offload` to the LightningModule while `Trainer.fit` trains:
    its `training_step` and its `forward`. Detached also where `fit` raises."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The module is on its device: attach."""
        self.attach(pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Detach."""
        self.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: Any) -> None:
        """Detach."""
        self.close()
