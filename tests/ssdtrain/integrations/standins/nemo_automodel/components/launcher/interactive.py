"""How NeMo AutoModel 0.7 runs the recipe that a configuration names."""

import importlib
from typing import Any


class InteractiveLauncher:
    def _run_recipe_in_process(self, recipe_target: str, config: Any) -> Any:
        module, _, name = recipe_target.rpartition(".")
        recipe = getattr(importlib.import_module(module), name)(config)
        recipe.setup()
        return recipe.run_train_validation_loop()
