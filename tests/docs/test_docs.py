"""Every code block of docs/ runs, or says in the page's source why it does not.

Python blocks of a page run one after the other in one process. `<!-- not run: reason
-->` above a block exempts it; `<!-- given: code -->` runs before it and is not shown,
`<!-- given, to each line: code -->` before each of its statements, which are variants.
`<!-- on a GPU, given: code -->`: `test_on_gpu.py` runs it, in a process of its own.
Commands are parsed by the parsers that they are for; nothing is trained.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.commands import check, commands
from tests.docs.on_gpu import mounted
from tests.docs.pages import ROOT, Block, blocks, pages, parts_of, where

ALL = [block for page in pages() for block in blocks(page)]
SHELL = [block for block in ALL if block.is_shell and block.runs_here]
PYTHON = sorted({b.page for b in ALL if b.is_python and b.runs_here})
RUNNER = """
import json, os, sys, traceback
found = {}
for page, parts in json.load(sys.stdin).items():
    names = {"__name__": "__main__"}
    try:
        for name, line, text in parts:
            exec(compile("\\n" * (line - 1) + text, name, "exec"), names)
        found[page] = None
    except BaseException:
        found[page] = traceback.format_exc()
with open("found.json", "w") as out:
    json.dump(found, out)
"""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """What became of every page, from one process: importing costs the most."""
    directory = tmp_path_factory.mktemp("docs")
    given = {
        str(page): [
            (name, line, mounted(text, directory))
            for b in blocks(page)
            if b.is_python and b.runs_here
            for name, line, text in parts_of(b)
        ]
        for page in PYTHON
    }
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input=json.dumps(given),
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, str | None] = json.loads((directory / "found.json").read_text())
    return found


@pytest.mark.parametrize("page", PYTHON, ids=lambda page: page.stem)
def test_python_blocks_run(page: Path, outcome: dict[str, str | None]) -> None:
    assert outcome[str(page)] is None, outcome[str(page)]


@pytest.mark.parametrize("block", SHELL, ids=where)
def test_commands_parse(block: Block) -> None:
    subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
    for words in commands(block.text):
        check(words)


@pytest.mark.parametrize(
    "told",
    [
        "train.checkpoint_every=",
        "resume=latest",
        "_saved_result",
        "`_version`",
    ],
)
def test_what_people_look_for_stands_on_a_page(told: str) -> None:
    """In a text for readers, beside the generated list of settings."""
    written = [page for page in pages() if page.name != "settings.md"]
    assert any(told in page.read_text() for page in written)


def test_nothing_is_exempt_without_a_reason() -> None:
    for block in ALL:
        assert block.not_run is None or len(block.not_run.split()) > 2, where(block)


def test_links_lead_somewhere() -> None:
    for page in pages():
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_what_is_looked_for_is_found(tmp_path: Path) -> None:
    """The test itself: broken blocks are seen as broken."""
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- given:\nx = 1\n-->\n```python\nassert x == 2\n```\n"
        "<!-- not run: needs a machine -->\n```bash\nfoo --bar\n```\n"
        "```\nssdtrain train nonsense=1\n```\n```\nplain text\n```\n"
    )
    first, second, third, fourth = blocks(page)
    assert first.is_python and first.given == "x = 1\n" and first.line == 5
    assert second.not_run == "needs a machine"
    assert third.is_shell and not fourth.is_shell
    for bad in (
        "ssdtrain train nonsense=1",
        "ssdtrain doctor --nonsense",
        "foo --bar",
        "make nonsense",
        "pip install 'ssdtrain[nonsense]'",
        "python -m recipes.bench storage.ssd --nonsense",
    ):
        with pytest.raises((Exception, SystemExit)):
            for words in commands(bad):
                check(words)
