"""ms-swift 4.6 puts a callback of its own in the place of transformers' default."""

from transformers import trainer
from transformers.trainer_callback import DefaultFlowCallback


class DefaultFlowCallbackNew(DefaultFlowCallback):  # type: ignore[misc]
    pass


trainer.DEFAULT_CALLBACKS = [DefaultFlowCallbackNew]
