"""What the callbacks of training frameworks share: settings, a session, its reports."""

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ssdtrain.api import Session, offload
from ssdtrain.config import OffloadConfig, OffloadOptions, with_options
from ssdtrain.counters import StepReport
from ssdtrain.errors import AttachError

if TYPE_CHECKING:
    from typing_extensions import Unpack


ATTACHED: "weakref.WeakSet[Attachment]" = weakref.WeakSet()  # with a session


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
        self._of: Callable[[], Any] = lambda: None
        self._training: object = None

    @property
    def reports(self) -> list[StepReport]:
        """A report for every finished optimizer step of the newest training."""
        return self._reports if self.session is None else self.session.steps

    def summary(self) -> str:
        """Three lines on the newest training: memory, time, what to do next; empty
        before the first."""
        return self._summary if self.session is None else self.session.summary()

    def attach(self, model: Any, training: object = None) -> None:
        """Offload what this model saves from now on, and nothing of an earlier one.
        Close what another `training`, such as one that raised, has left attached."""
        for each in list(ATTACHED):
            if each is self or (each._of() is model and each._training is not training):
                each._leave()
        self.session = offload(model, self.settings)
        self._of, self._training = weakref.ref(model), training
        ATTACHED.add(self)

    def require(self, training: object) -> None:
        """Raise AttachError: another training than this one has begun since, with this
        callback or on its model."""
        if self._training is not training:
            raise AttachError(
                f"another training began with this {type(self).__name__} or its model, "
                "and this one goes on; give each trainer its own model and callback."
            )

    def _leave(self) -> None:
        self._training = None
        self.close()

    def close(self) -> None:
        """Restore the model; the reports stay. Idempotent."""
        ATTACHED.discard(self)
        if self.session is not None:
            session, self.session = self.session, None
            self._reports, self._summary = list(session.steps), session.summary()
            session.close()
