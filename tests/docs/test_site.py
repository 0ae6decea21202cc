"""The documentation site: every page has its place, and it builds without a warning."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, pages


def test_every_page_has_a_place() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    placed = re.findall(r"([\w/-]+\.md)", text)
    docs = ROOT / "docs"
    written = {str(p.relative_to(docs)) for p in pages() if p.is_relative_to(docs)}
    results = {name for name in written if name.startswith("results/")}
    assert written - results <= set(placed) <= written


def test_the_reference_names_what_exists() -> None:
    from importlib import import_module

    named = re.findall(r"^::: (\S+)$", (ROOT / "docs/reference.md").read_text(), re.M)
    assert len(named) > 5
    for name in named:
        home, _, attribute = name.rpartition(".")
        module = import_module(home)
        assert hasattr(module, attribute) or import_module(name), name


def test_it_builds(tmp_path: Path) -> None:
    """`make docs`: strict, so that a dead link or an unknown name is an error."""
    mkdocs = shutil.which("mkdocs") or Path(sys.executable).with_name("mkdocs")
    if not Path(mkdocs).exists():
        pytest.skip("mkdocs is not installed (extra `docs`)")
    done = subprocess.run(
        [str(mkdocs), "build", "--quiet", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    reference = (tmp_path / "site" / "reference.html").read_text()
    assert "ssdtrain.api.offload" in reference
    assert "Keep, offload or recompute what autograd saves" in reference
