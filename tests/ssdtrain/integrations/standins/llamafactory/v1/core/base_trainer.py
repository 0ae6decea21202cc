"""The callbacks of llamafactory 0.9.5's v1 trainer, as far as ssdtrain meets them."""

from typing import Any

EVENTS = ("on_train_begin", "on_step_begin", "on_step_end", "on_train_end")


class TrainerCallback:
    def on_train_begin(self, args: Any, state: Any, **kwargs: Any) -> None: ...

    def on_step_begin(self, args: Any, state: Any, **kwargs: Any) -> None: ...

    def on_step_end(self, args: Any, state: Any, **kwargs: Any) -> None: ...

    def on_train_end(self, args: Any, state: Any, **kwargs: Any) -> None: ...


class CallbackHandler:
    def __init__(self, callbacks: Any = None, trainer: Any = None) -> None:
        self.callbacks: list[TrainerCallback] = list(callbacks or [])
        self.trainer = trainer

    def __getattr__(self, event: str) -> Any:
        if event not in EVENTS:
            raise AttributeError(event)

        def call(args: Any, state: Any) -> None:
            for callback in self.callbacks:
                getattr(callback, event)(args, state, model=self.trainer.model)

        return call
