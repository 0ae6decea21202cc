"""What the callbacks of training frameworks share: settings, a session, its reports."""

from typing import TYPE_CHECKING, Any

from ssdtrain.api import Session, offload
from ssdtrain.config import OffloadConfig, OffloadOptions, with_options
from ssdtrain.counters import StepReport

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Attachment:
    """Attaches `ssdtrain.offload` to the model of one training run after another."""

    @with_options
    def __init__(
        self, config: OffloadConfig | None = None, **overrides: "Unpack[OffloadOptions]"
    ) -> None:
        """Check the settings; nothing is attached yet.

        Args:
            config: settings; None means defaults.
            overrides: fields of `OffloadConfig`, on top of `config`.

        Raises:
            ConfigError: a setting can never work.
        """
        # Here, and not when it is attached: that is after the model was prepared.
        self.settings = OffloadConfig.merged(config, overrides)
        """What every session is opened with."""
        self._reports: list[StepReport] = []
        self._summary = ""
        self.session: Session | None = None
        """The session of the training that is running; None outside."""

    @property
    def reports(self) -> list[StepReport]:
        """A report for every finished optimizer step of the newest training."""
        return self._reports if self.session is None else self.session.steps

    def summary(self) -> str:
        """Three lines on the newest training: memory, time, what to do next; empty
        before the first."""
        return self._summary if self.session is None else self.session.summary()

    def attach(self, model: Any) -> None:
        """Offload what this model saves from now on, and nothing of an earlier one."""
        self.close()
        self.session = offload(model, self.settings)

    def close(self) -> None:
        """Restore the model; the reports stay. Idempotent."""
        if self.session is not None:
            session, self.session = self.session, None
            self._reports, self._summary = list(session.steps), session.summary()
            session.close()
