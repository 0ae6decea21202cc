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
        """Attach: the module is on its device."""
        self.attach(pl_module, trainer)

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        """Raise AttachError: another training has taken the callback or the module."""
        self.require(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        """Give the newest figures to the module's loggers, where it has any."""
        if self.session is not None and trainer.loggers:
            pl_module.log_dict(self.session.figures)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Detach."""
        self.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: Any) -> None:
        """Detach."""
        self.close()
