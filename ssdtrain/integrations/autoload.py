"""What `ssdtrain_autoload.pth` calls as Python starts with SSDTRAIN set.

Nothing is imported then but this file. A finder waits for the trainers' modules; once
one of them is imported, a hook puts the callback in. SSDTRAIN is read by the hook:
a process that imports no trainer meets no error of it.

[Note: Hooks after imports] `site` prints errors of a .pth file and goes on, so nothing
that may fail is done there. The finder asks the other finders for the module, and wraps
`exec_module` of the loader it gets. (tests/ssdtrain/integrations/test_autoload.py)
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

HOOKS = {
    "transformers.trainer": "ssdtrain.integrations.transformers",
    "torch.optim.optimizer": "ssdtrain.integrations.reached",
    "swift.trainers.patcher": "ssdtrain.integrations.swift",
    "llamafactory.v1.core.base_trainer": "ssdtrain.integrations.llamafactory",
    "verl.utils.activation_offload": "ssdtrain.integrations.verl",
}
"""By module: whose `imported(module)` is called once it is there."""


class ImportHook(MetaPathFinder):
    """Calls hooks after imports; see [Note: Hooks after imports]."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """The module's own spec, with a loader that calls the hook; None for others."""
        if fullname not in HOOKS:
            return None
        others = [each for each in sys.meta_path if not isinstance(each, ImportHook)]
        found = (each.find_spec(fullname, path, target) for each in others)
        spec = next((each for each in found if each is not None), None)
        if spec is None or spec.loader is None:
            return spec
        loader, execute = spec.loader, spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if module.__name__ == fullname:  # zipimport has one loader for all
                call(HOOKS[fullname], module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def call(hook: str, module: ModuleType) -> None:
    """Call `imported` of the module named `hook`."""
    from importlib import import_module

    import_module(hook).imported(module)


def install() -> None:
    """Wait for the trainers' modules; those that are there get their hook now."""
    if any(isinstance(each, ImportHook) for each in sys.meta_path):
        return
    sys.meta_path.insert(0, ImportHook())
    for name, hook in HOOKS.items():
        if name in sys.modules:
            call(hook, sys.modules[name])
