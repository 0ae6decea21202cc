"""The fenced blocks of a page, and what stands above them for the test."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOT_RUN = re.compile(r"<!-- not run: (.+?) -->", re.S)
GIVEN = re.compile(r"<!-- given(, to each line)?:\n(.*?)-->", re.S)
ON_GPU = re.compile(r"<!-- on a GPU(?:, given:\n(.*?))? ?-->", re.S)
SHELL = ("bash", "sh", "console")
COMMANDS = ("ssdtrain", "python", "recipes/", "pip", "make", "deepspeed", "torchrun")


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: Path
    line: int
    """Of its first line of text, counted from 1."""
    language: str
    text: str
    not_run: str | None
    """The reason in `<!-- not run: reason -->` right above it."""
    given: str
    """Code in `<!-- given: ... -->` right above it: what the reader has already."""
    line_by_line: bool = False
    """`<!-- given, to each line: ... -->`: the lines are variants of one another."""
    on_gpu: bool = False
    """`<!-- on a GPU -->` or `<!-- on a GPU, given: ... -->`: `tests.docs.on_gpu` runs
    it, in a process of its own."""

    @property
    def runs_here(self) -> bool:
        """Without a GPU, among the page's other blocks."""
        return not self.not_run and not self.on_gpu

    @property
    def is_python(self) -> bool:
        return self.language == "python"

    @property
    def is_shell(self) -> bool:
        """By its language, or without one by its first word."""
        first = self.text.split("=", 1)[-1] if "PYTHONPATH=" in self.text else self.text
        return self.language in SHELL or (
            not self.language and first.removeprefix(". ").startswith(COMMANDS)
        )


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page."""
    found: list[Block] = []
    text = page.read_text(encoding="utf-8")
    lines = text.splitlines()
    start: int | None = None
    last_end = 0
    for number, line in enumerate(lines):
        if not line.lstrip().startswith("```"):
            continue
        if start is None:
            start = number
            continue
        above = "\n".join(lines[last_end:start]).rstrip()
        comment = above[above.rfind("<!--") :] if above.endswith("-->") else ""
        skipped, given = NOT_RUN.fullmatch(comment), GIVEN.fullmatch(comment)
        on_gpu = ON_GPU.fullmatch(comment)
        code = given.group(2) if given else on_gpu.group(1) if on_gpu else ""
        found.append(
            Block(
                page=page,
                line=start + 2,
                language=lines[start].strip().removeprefix("```").strip(),
                text="\n".join(lines[start + 1 : number]) + "\n",
                not_run=skipped.group(1) if skipped else None,
                given=code or "",
                line_by_line=bool(given and given.group(1)),
                on_gpu=on_gpu is not None,
            )
        )
        start, last_end = None, number + 1
    return found


def parts_of(block: Block) -> Iterator[tuple[str, int, str]]:
    """What runs, in order: its name, the number of its first line, its text."""
    page, given = str(block.page), (f"{block.page}, given", 1, block.given)
    if not block.line_by_line:
        yield from (given, (page, block.line, block.text))
        return
    for statement in ast.parse(block.text).body:
        lines = block.text.splitlines()[statement.lineno - 1 : statement.end_lineno]
        yield from (given, (page, block.line + statement.lineno - 1, "\n".join(lines)))


def where(block: Block) -> str:
    return f"{block.page.stem}:{block.line}"
