"""LLaMA-Factory's v1 trainer, which has callbacks of its own. Its other trainers are
transformers', which `transformers.py` reaches.

    SSDTRAIN=fit USE_V1=1 llamafactory-cli sft x.yaml
"""

from types import ModuleType
from typing import Any

from ssdtrain import switch
from ssdtrain.errors import ConfigError
from ssdtrain.integrations import check_trainer_version

HANDLER, CALLBACK = "CallbackHandler", "TrainerCallback"


def imported(module: ModuleType) -> None:
    """Let the callbacks of `llamafactory.v1.core.base_trainer`, just imported, begin
    with ours. Raises ConfigError: SSDTRAIN is misspelt, or these are not the callbacks
    that we know."""
    settings = switch.asked()
    if settings is None:
        return
    check_trainer_version("llamafactory")
    handler: Any = getattr(module, HANDLER, None)
    callback: Any = getattr(module, CALLBACK, None)
    if handler is None or callback is None:
        raise ConfigError(
            f"ssdtrain expects {HANDLER} and {CALLBACK} in {module.__name__}, which "
            "has them no more; unset SSDTRAIN."
        )

    class Handler(handler):  # type: ignore[misc]
        """The trainer's own, with one callback more."""

        def __init__(self, callbacks: Any = None, trainer: Any = None) -> None:
            super().__init__([*(callbacks or []), offloading(callback)], trainer)

    setattr(module, HANDLER, Handler)


def offloading(base: type[Any]) -> Any:
    """A callback for v1, with the settings of SSDTRAIN."""
    from ssdtrain.train.attachment import Attachment
    from ssdtrain.train.checkpointed import take_over

    class OffloadV1Callback(Attachment, base):  # type: ignore[misc]
        """Attaches `ssdtrain.offload` while the v1 trainer trains."""

        def on_train_begin(
            self, args: Any, state: Any, *, model: Any, **kwargs: Any
        ) -> None:
            """Attach."""
            take_over(model, self.settings)
            self.attach(model)

        def on_step_end(self, args: Any, state: Any, **kwargs: Any) -> None:
            """Count the optimizer's step."""
            if self.session is not None:
                self.session.hints.step_end()

        def on_train_end(self, args: Any, state: Any, **kwargs: Any) -> None:
            """Detach, and print what was saved and what it cost."""
            self.close()
            print(self.summary())

    return OffloadV1Callback(switch.asked())
