"""One line in a stock `transformers.Trainer` script.

Trainer(..., callbacks=[OffloadCallback(target="ssd", directory="/mnt/nvme0/me")])
"""

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from ssdtrain.api import Session, offload
from ssdtrain.config import OffloadConfig, OffloadOptions, with_options
from ssdtrain.counters import StepReport
from ssdtrain.errors import AttachError

if TYPE_CHECKING:
    from typing_extensions import Unpack


class OffloadCallback(TrainerCallback):  # type: ignore[misc]
    """Attaches `ssdtrain.offload` to the model while `Trainer.train` runs.

    Gradient accumulation, evaluation between steps, `peft` models, DDP and DeepSpeed
    ZeRO need no further setting. An exception inside `train` leaves the session
    attached; the next `train` or `close` ends it.
    """

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
        # Here, and not when it is attached: that is after the model was prepared.
        self._settings = OffloadConfig.merged(config, overrides)
        self._reports: list[StepReport] = []
        self.session: Session | None = None
        """The session of the `train` that is running; None outside."""

    @property
    def reports(self) -> list[StepReport]:
        """A report for every finished optimizer step of the newest `train`."""
        return self._reports if self.session is None else self.session.steps

    def close(self) -> None:
        """Restore the model; the reports stay. Idempotent."""
        if self.session is not None:
            self._reports = list(self.session.steps)
            self.session.close()
            self.session = None

    def __getattr__(self, name: str) -> Any:
        """Say so where Lightning looks for hooks of its own.

        Raises:
            AttachError: for Lightning's hooks; AttributeError for anything else.
        """
        if name.startswith("on_") or name in ("setup", "teardown", "state_key"):
            raise AttachError(
                "OffloadCallback is for transformers.Trainer; give lightning.Trainer "
                "callbacks=[ssdtrain.LightningCallback(...)] instead."
            )
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """The model is prepared and on its device: attach."""
        self.close()
        self.session = offload(model, self._settings)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The optimizer has stepped. Under ZeRO-3 no weight would tell."""
        if self.session is not None:
            self.session.hints.step_end()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Detach."""
        self.close()
