"""The settings page is what the dataclasses say now."""

import importlib.util
from dataclasses import fields
from types import ModuleType

from ssdtrain.config import OffloadConfig
from tests.docs.pages import ROOT


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("page", ROOT / "docs/settings.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date() -> None:
    written = generator().page()
    assert (ROOT / "docs/settings.md").read_text() == written, "run `make settings`"
    for field in fields(OffloadConfig):
        assert f"| `{field.name}` |" in written
    for part in ("`0.01`", "gat", "`stdlib`: The sources", "h8192x4", "`tiered`: Host"):
        assert part in written
