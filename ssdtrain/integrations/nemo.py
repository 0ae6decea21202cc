"""NeMo AutoModel: a recipe with a block of settings.

    recipe: ssdtrain.integrations.nemo.OffloadingRecipe
    ssdtrain:
      device_memory: fit

Another recipe that has `model_parts`: `class Mine(Offloading, TheRecipe)`.
"""

import sys

if __name__ == "__main__":
    # The launcher starts this file as a script. Its neighbours have trainers' names.
    sys.path.pop(0)

from typing import Any

from nemo_automodel.recipes.llm import train_ft

from ssdtrain.api import Session, offload
from ssdtrain.errors import AttachError, ConfigError
from ssdtrain.integrations import block_settings, check_trainer_version

CHECKPOINTING = "distributed.activation_checkpointing"


class Offloading:
    """Adds a session to a recipe: from the end of `setup` to the end of its loop."""

    cfg: Any
    model_parts: list[Any]
    offloading: Session

    def setup(self) -> None:
        """Set up the recipe, and attach to its model parts. Raises ConfigError: no
        block of settings, one that can never work, or activations are checkpointed as
        well; AttachError: the recipe has set up no model."""
        check_trainer_version("nemo-automodel")
        settings = block_settings(self.cfg)
        again = self.cfg.get(CHECKPOINTING, False)
        if str(again).lower() not in ("false", "none"):
            raise ConfigError(
                "ssdtrain decides what is computed again, so it expects no "
                f"{CHECKPOINTING}, got {again!r}; set it to false."
            )
        super().setup()  # type: ignore[misc]
        parts = getattr(self, "model_parts", None)
        if not parts:
            raise AttachError(
                "ssdtrain expects model_parts after the recipe's setup, got "
                f"{parts!r}; take another recipe, or leave ssdtrain out."
            )
        self.offloading = offload(parts, settings)

    def run_train_validation_loop(self) -> Any:
        """Train, and print what was saved and what it cost."""
        with self.offloading as session:
            result = super().run_train_validation_loop()  # type: ignore[misc]
            print(session.summary())
        return result


class OffloadingRecipe(
    Offloading,
    train_ft.TrainFinetuneRecipeForNextTokenPrediction,  # type: ignore[misc]
):
    """Fine-tunes a language model, and offloads what its forward saves."""


def main() -> None:
    """Train with the configuration that the command line names."""
    from nemo_automodel.components.config._arg_parser import parse_args_and_load_config

    recipe = OffloadingRecipe(parse_args_and_load_config())
    recipe.setup()
    recipe.run_train_validation_loop()


if __name__ == "__main__":
    main()
