"""One line in a stock Lightning script.

lightning.Trainer(..., callbacks=[LightningCallback(target="host")])
"""

from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Callback

from ssdtrain.api import Session, offload
from ssdtrain.config import OffloadConfig, OffloadOptions, with_options
from ssdtrain.counters import StepReport

if TYPE_CHECKING:
    from typing_extensions import Unpack


class LightningCallback(Callback):  # type: ignore[misc]
    """Attaches `ssdtrain.offload` to the LightningModule while `Trainer.fit` trains:
    its `training_step` and its `forward`. Detached also where `fit` raises."""

    @with_options
    def __init__(
        self,
        config: OffloadConfig | None = None,
        **overrides: "Unpack[OffloadOptions]",
    ) -> None:
        """Check the settings; nothing is attached yet.

        Args:
            config: settings; None means defaults.
            overrides: fields of `OffloadConfig`, on top of `config`.

        Raises:
            ConfigError: a setting can never work.
        """
        self._settings = OffloadConfig.merged(config, overrides)
        self._reports: list[StepReport] = []
        self.session: Session | None = None
        """The session of the `fit` that is running; None outside."""

    @property
    def reports(self) -> list[StepReport]:
        """A report for every finished optimizer step of the newest `fit`."""
        return self._reports if self.session is None else self.session.steps

    def close(self) -> None:
        """Restore the module; the reports stay. Idempotent."""
        if self.session is not None:
            self._reports = list(self.session.steps)
            self.session.close()
            self.session = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The module is on its device: attach."""
        self.close()
        self.session = offload(pl_module, self._settings)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Detach."""
        self.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: Any) -> None:
        """Detach."""
        self.close()
