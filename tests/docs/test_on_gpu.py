"""Blocks marked `on a GPU` run on one; how they are run is tried without."""

import json
import sys
from pathlib import Path

import pytest
import torch

from tests.docs import on_gpu
from tests.docs.on_gpu import Script, on_gpu_scripts, page_scripts, run, run_all
from tests.docs.pages import blocks

LIMIT_S = 150.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("script", on_gpu_scripts(), ids=lambda script: script.name)
def test_block(script: Script) -> None:
    outcome = run(script, LIMIT_S)
    assert outcome.ok, outcome.tail


def test_there_are_marked_blocks() -> None:
    pages = {script.name.partition(":")[0] for script in on_gpu_scripts()}
    assert {"quickstart", "megatron", "storage", "relational-graphs"} <= pages
    for script in on_gpu_scripts():
        if not script.is_shell:
            compile(script.text, script.name, "exec")


def test_what_runs_here_is_not_marked(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- on a GPU, given:\nx = 1\n-->\n```python\nprint(x)\n```\n"
        "<!-- on a GPU -->\n```bash\nhector kernels make\n```\n"
        "```python\nprint(2)\n```\n"
    )
    first, second, third = blocks(page)
    assert first.on_gpu and first.given == "x = 1\n" and not first.runs_here
    assert second.on_gpu and second.is_shell and second.given == ""
    assert third.runs_here and not third.on_gpu
    assert len({script.name for script in page_scripts()}) > 15


def test_outcomes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    scripts = [
        Script("fine", "import os\nassert os.path.isdir('/mnt/nvme1/me')"),
        Script("bad", "raise ValueError('as it happens')"),
        Script("shell", "ssdtrain --version\n", is_shell=True),
    ]
    monkeypatch.setattr(on_gpu, "on_gpu_scripts", lambda: scripts)
    monkeypatch.setattr(on_gpu, "page_scripts", lambda: ())
    out = tmp_path / "docs.json"
    monkeypatch.setattr(sys, "argv", ["on_gpu", "--out", str(out)])
    assert on_gpu.main() == 1
    rows = json.loads(out.read_text())
    assert [row["ok"] for row in rows.values()] == [True, False, True]
    assert "as it happens" in rows["bad"]["tail"] and "tail" not in rows["fine"]


def test_the_budget_ends_a_block() -> None:
    endless = Script("endless", "import time\nwhile True:\n    time.sleep(1)")
    found = run(endless, 0.5)
    assert not found.ok and "stopped after" in found.tail
    found = run_all([endless], 0.5)["endless"]
    assert not found.ok and "not run" in found.tail
