"""One line in a stock `transformers.Trainer` script.

Trainer(..., callbacks=[OffloadCallback(target="ssd", directory="/mnt/nvme0/me")])
"""

from typing import Any

from transformers import TrainerCallback

from ssdtrain.errors import AttachError
from ssdtrain.train.attachment import Attachment


class OffloadCallback(Attachment, TrainerCallback):  # type: ignore[misc]
    """Attaches `ssdtrain.offload` to the model while `Trainer.train` runs.

    Gradient accumulation, evaluation between steps, `peft` models, DDP and DeepSpeed
    ZeRO need no further setting. An exception inside `train` leaves the session
    attached; the next `train` or `close` ends it.
    """

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
        """Attach: the model is prepared and on its device."""
        self.attach(model)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the optimizer's step. Under ZeRO-3 no weight would tell."""
        if self.session is not None:
            self.session.hints.step_end()

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the newest figures to what is logged: to the history, and for callbacks
        after this one. Nothing to the logs of evaluations."""
        if self.session is None or logs is None or _is_evaluation(logs):
            return
        figures = self.session.figures
        logs.update(figures)
        if state.log_history:
            state.log_history[-1].update(figures)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Detach, and print what was saved and what it cost."""
        was_attached = self.session is not None
        self.close()
        if was_attached and (state is None or state.is_world_process_zero):
            print(self.summary())


def _is_evaluation(logs: dict[str, Any]) -> bool:
    return any(name.startswith("eval_") for name in logs)
