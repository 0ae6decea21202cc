"""What ms-swift 4.6 does with `--external_plugins`."""

import importlib.util
import os
import sys
from typing import Any


def import_external_file(file_path: str) -> Any:
    path = os.path.abspath(file_path)
    sys.path.insert(0, os.path.dirname(path))
    spec = importlib.util.spec_from_file_location("_swift_external", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
