"""docs/hector.md and docs/message-passing.md: the code runs in order and prints what
the pages say."""

import contextlib
import importlib.util
import io
import re
from pathlib import Path

import pytest
import torch

import hector

DOCS = Path(__file__).resolve().parents[2] / "docs"


def blocks(page: str) -> list[tuple[str, str]]:
    """(code, what the page shows below it or nothing)."""
    parts = re.findall(r"```(\w*)\n(.*?)```", (DOCS / page).read_text(), re.S)
    found: list[tuple[str, str]] = []
    for language, text in parts:
        if language == "python":
            found.append((text, ""))
        else:
            found[-1] = (found[-1][0], text)
    return found


@pytest.mark.parametrize(
    ("page", "num_shown"), [("hector.md", 4), ("message-passing.md", 3)]
)
def test_the_page_runs(tmp_path: Path, page: str, num_shown: int) -> None:
    """Layers are read from their source, so each block is a file of its own."""
    torch.manual_seed(0)
    names: dict[str, object] = {}
    shown = 0
    for i, (code, expected) in enumerate(blocks(page)):
        path = tmp_path / f"block{i}" / "layers.py"
        path.parent.mkdir()
        path.write_text(code)
        spec = importlib.util.spec_from_file_location(f"page_block{i}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        vars(module).update(names)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            try:
                spec.loader.exec_module(module)
            except hector.UnsupportedPythonError as error:
                text = str(error).replace(f"{path.parent}/", "")
                print(f"UnsupportedPythonError: {text}")
        names = {k: v for k, v in vars(module).items() if not k.startswith("__")}
        assert printed.getvalue().rstrip() == expected.rstrip()
        shown += bool(expected)
    assert shown == num_shown
    if page == "hector.md":
        assert names["x"].grad is not None  # type: ignore[attr-defined]
