"""One line in a stock `transformers.Trainer` script.

Trainer(..., callbacks=[OffloadCallback(target="ssd", directory="/mnt/nvme0/me")])
"""

import logging
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ssdtrain.errors import AttachError
from ssdtrain.train.attachment import Attachment
from ssdtrain.train.checkpointed import refuse_offloading, take_over
from ssdtrain.train.kept import follow_kept, keep

logger = logging.getLogger(__name__)


class OffloadCallback(Attachment, TrainerCallback):  # type: ignore[misc]
    """Attaches `ssdtrain.offload` to the model while `Trainer.train` runs.

    Gradient accumulation, evaluation between steps, `peft` models, DDP and DeepSpeed
    ZeRO need no further setting. An exception inside `train` leaves the session
    attached; the next `train` or `close` ends it.

    The plan is saved with every checkpoint, and a run that resumes from one follows it.
    With a goal in memory (`device_memory`, `memory_budget`) activation
    checkpointing of the trainer is switched off: the plan decides what is computed
    again.
    """

    def __getattr__(self, name: str) -> Any:
        """Raise AttachError where Lightning looks for hooks of its own."""
        if name.startswith("on_") or name in ("setup", "teardown", "state_key"):
            raise AttachError(
                "OffloadCallback is for transformers.Trainer; give lightning.Trainer "
                "callbacks=[ssdtrain.LightningCallback(...)] instead."
            )
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Raise AttachError if the trainer moves saved tensors itself, before it loads
        anything."""
        refuse_offloading(args)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Attach: the model is prepared and on its device. Raises AttachError: the
        trainer offloads activations itself."""
        refuse_offloading(args)
        take_over(model, self.settings)
        self.attach(model, state)
        if self.session is not None and state is not None and state.global_step:
            checkpoint = _checkpoint_of(args, state)
            if follow_kept(self.session, self.settings, checkpoint):
                logger.info("ssdtrain: follows the plan kept in %s", checkpoint)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Raise AttachError: another training has taken the callback or the model."""
        self.require(state)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the plan with the checkpoint, if it was written here."""
        directory = _saved_to(args, state)
        if self.session is not None and directory.is_dir():
            keep(self.session, self.settings, directory)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the optimizer's step. Under ZeRO-3 no weight would tell."""
        if self.session is not None:
            self.session.hints.step_end()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any
    ) -> None:
        """Add figures to the history, and for later callbacks; none to evaluations."""
        if self.session is None or logs is None:
            return
        if any(name.startswith("eval_") for name in logs):
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


def _saved_to(args: Any, state: Any) -> Path:
    """Where transformers puts the checkpoint of a step."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _checkpoint_of(args: Any, state: Any) -> Path:
    """The checkpoint that this run began with; `train(...)` may not have said."""
    given = args.resume_from_checkpoint
    if isinstance(given, str) and Path(given).is_dir():
        return Path(given)
    return _saved_to(args, state)
