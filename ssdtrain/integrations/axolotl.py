"""Axolotl: a plugin with a block of settings.

plugins:
  - ssdtrain.integrations.axolotl.SSDTrainPlugin
ssdtrain:
  device_memory: fit
"""

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from ssdtrain import switch
from ssdtrain.errors import AttachError, ConfigError
from ssdtrain.integrations import block_settings, check_trainer_version


class SSDTrainArgs(BaseModel):
    """What the plugin adds to Axolotl's configuration."""

    ssdtrain: dict[str, Any] | None = None
    """Fields of `OffloadConfig`."""


class SSDTrainPlugin(BasePlugin):  # type: ignore[misc]
    """Adds `OffloadCallback` to the trainer that Axolotl builds."""

    _callback: Any = None

    def register(self, cfg: Any) -> None:
        """Check the settings, before a model is loaded. Raises ConfigError: there are
        none, they can never work, or Axolotl offloads as well or has another
        version."""
        check_trainer_version("axolotl")
        switch.refuse_plugin("Axolotl")
        if cfg.get("activation_offloading"):
            raise ConfigError(
                "ssdtrain offloads what the forward saves, so it expects no "
                f"activation_offloading, got {cfg.get('activation_offloading')!r}; "
                "leave it out."
            )
        block_settings(cfg)

    def get_input_args(self) -> str:
        """The class with the plugin's block."""
        return f"{SSDTrainArgs.__module__}.{SSDTrainArgs.__name__}"

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
        """The callback."""
        from ssdtrain.train.callback import OffloadCallback

        self._callback = OffloadCallback(block_settings(cfg))
        return [self._callback]

    def post_train(self, cfg: Any, model: Any) -> None:
        """Raise AttachError if Axolotl trained and never called the callback."""
        if self._callback is None or not self._callback.reports:
            raise AttachError(
                "Axolotl trained, but ssdtrain saw no step: its trainer does not call "
                "callbacks of transformers. Call ssdtrain.offload(model) in a script."
            )
