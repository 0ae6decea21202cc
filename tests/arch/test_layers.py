"""The house rules that a machine can check: floors, sizes, imports."""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from ssdtrain.config import Target

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("ssdtrain", "pydirect", "hector")

# A file imports only lower floors (DESIGN: Floors). Same number: same floor, and
# two floors that stand beside one another share no import.
FLOORS = {
    "errors": 0,
    "config": 0,
    "quantities": 0,
    "counters": 0,
    "curves": 0,
    "forks": 0,
    "jsonfile": 0,
    "packaged": 0,
    "versions": 0,
    "rates": 0,
    "queues": 0,
    "gathered": 0,
    "collectives": 0,
    "numa": 0,
    "numerics": 0,
    "switch": 0,
    "storage": 1,
    "transfer": 2,
    "plan": 3,
    "rebuild": 3,
    "regions": 3,
    "cache": 4,
    "observe": 5,
    "engines": 6,
    "summary": 6,
    "api": 7,
    "train": 8,
    "integrations": 9,
    "tools": 8,
    "tools.arguments": 8,
    "tools.progress": 8,
    "tools.foresight": 8,
    "tools.machine": 8,
    "tools.printed": 8,
    "tools.project": 9,
    "tools.report": 9,
    "tools.search": 10,
    "tools.cli": 11,
}
# Pure rooms that import the ground floor alone.
GROUND_ONLY = {"plan", "tools.foresight", "tools.machine", "tools.project"}
# `project` reads foresight's data sheets; both print tables.
BESIDE = {
    "tools.machine": {"tools.printed"},
    "tools.project": {"tools.foresight", "tools.printed"},
}
GROUND = {
    "errors",
    "config",
    "counters",
    "curves",
    "quantities",
    "tools.arguments",
    "forks",
    "jsonfile",
    "numa",
    "packaged",
    "versions",
    "rates",
    "queues",
    "tools.progress",
    "switch",
}
HEAVY = ("deepspeed", "megatron", "transformers", "matplotlib", "kvikio", "triton")


def product_files() -> list[Path]:
    return sorted(
        p for pkg in PACKAGES for p in (ROOT / pkg).rglob("*.py") if p.is_file()
    )


def all_files() -> list[Path]:
    more = [p for d in ("tests", "recipes") for p in (ROOT / d).rglob("*.py")]
    return product_files() + sorted(more)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """Read once for all rules, which leave it as it is."""
    return ast.parse(path.read_text())


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All of a file of the product: walking takes longer than what a rule asks."""
    return tuple(ast.walk(tree_of(path)))


@functools.cache
def imports(path: Path) -> tuple[str, ...]:
    """Absolute dotted names of everything the file imports, wherever it stands."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    found: list[str] = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            dotted = ".".join([*base, *([node.module] if node.module else [])])
            found += [dotted, *(f"{dotted}.{a.name}" for a in node.names)]
    return tuple(found)


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def floor_of(dotted: str) -> str | None:
    """The room of ssdtrain that a name is in; each tool is a room of its own."""
    package, *parts = dotted.split(".")
    if package != "ssdtrain" or not parts:
        return None
    return ".".join(parts[: 1 + (parts[0] == "tools")])


def test_packages_do_not_import_one_another() -> None:
    for path in product_files():
        own = path.relative_to(ROOT).parts[0]
        others = {*PACKAGES, "tests", "recipes"} - {own}
        for dotted in imports(path):
            assert dotted.split(".")[0] not in others, f"{name(path)} imports {dotted}"


def test_no_globals_and_no_asserts() -> None:
    for path in product_files():
        for node in nodes_of(path):
            assert not isinstance(node, ast.Global), f"{name(path)}: a `global`"
            assert not isinstance(node, ast.Assert), (
                f"{name(path)}: assert at line {node.lineno}: raise"
            )


def ssdtrain_files() -> list[Path]:
    return [p for p in product_files() if p.is_relative_to(ROOT / "ssdtrain")]


def room_of(path: Path) -> str:
    return str(floor_of(".".join(path.relative_to(ROOT).with_suffix("").parts)))


def test_floors() -> None:
    for path in ssdtrain_files():
        own = room_of(path)
        if own in ("__init__", "__main__"):
            continue
        for dotted in imports(path):
            other = floor_of(dotted)
            if other is None or other == own:
                continue
            said = f"{name(path)} imports {dotted}"
            if own in GROUND_ONLY:
                allowed = GROUND | BESIDE.get(own, set())
                assert other in allowed, f"{said}: ground floor only"
            elif other in FLOORS:
                assert FLOORS[other] < FLOORS[own] or {own, other} <= GROUND, (
                    f"{said}: not a lower floor"
                )
            else:
                assert own == "tools.cli", f"{said}: only cli may"


def test_the_core_does_not_know_its_tools() -> None:
    """Nor by a name that `import_module` would get."""
    tools = [path for path in FLOORS if path.startswith("tools")]
    assert min(FLOORS[tool] for tool in tools) > FLOORS["api"]
    for path in ssdtrain_files():
        room = room_of(path)
        if room.startswith("tools") or room == "__main__":
            continue
        for node in nodes_of(path):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                where = f"{name(path)}:{node.lineno}"
                assert not node.value.startswith("ssdtrain.tools"), where


def test_frameworks_stay_in_their_rooms() -> None:
    """Only engines/ and train/ know DeepSpeed and Megatron."""
    for path in ssdtrain_files():
        if room_of(path) not in ("engines", "train"):
            tops = {dotted.split(".")[0] for dotted in imports(path)}
            assert not tops & {"deepspeed", "megatron"}, name(path)


def test_imports_are_light() -> None:
    """`import package` starts no thread, no CUDA and loads no framework."""
    code = (
        "import sys, threading, importlib, torch\n"
        f"for package in {PACKAGES!r}:\n"
        "    importlib.import_module(package)\n"
        f"    heavy = [m for m in {HEAVY!r} if m in sys.modules]\n"
        "    assert not heavy, (package, heavy)\n"
        "    assert threading.active_count() == 1, (package, threading.enumerate())\n"
        "    assert not torch.cuda.is_initialized(), package\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=280)


# -- targets ---------------------------------------------------------------------------


def test_targets_are_told_apart_in_one_file() -> None:
    """Elsewhere its row in `Target` is asked (`behind`), so that a new one is said in
    config.py alone. "host" is many other things as well."""
    names = {target.name for target in Target}
    told = {target.value for target in Target} - {Target.HOST.value}
    for path in ssdtrain_files():
        if path == ROOT / "ssdtrain/config.py":
            continue
        for node in nodes_of(path):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                is_member = node.value.id == Target.__name__ and node.attr in names
                where = f"{name(path)}:{node.lineno}"
                assert not is_member, f"{where}: ask `Target.behind`"
            elif isinstance(node, ast.Constant):
                text, where = str(node.value), f"{name(path)}:{node.lineno}"
                assert text not in told, f"{where}: {text!r}, a target's name"


# -- private names ---------------------------------------------------------------------

# torch's, and those that every NamedTuple has.
FOREIGN = {
    *("_sleep", "_replace", "_base", "_is_in_bad_fork", "_push_mode", "_version"),
    *("_softmax", "_to_copy"),
}
# Names that tests still reach, by file: faults put into a class, orders of
# streams, tables without a public view. The list only gets shorter.
STILL_REACHED: dict[str, set[str]] = {
    "tests/hector/emit/bound_cases.py": {
        "_backward",
        "_contractions",
        "_device",
        "_kept",
        "_torch",
    },
    "tests/hector/emit/sampled_cases.py": {"_backward", "_device", "_forward"},
    "tests/hector/frontend/test_stale.py": {"_graphs", "_programs"},
    "tests/hector/nn/test_stale.py": {"_graphs"},
    "tests/pitfalls/test_order.py": {"_load", "_store"},
    "tests/pydirect/gather/test_chooser.py": {"_learnt"},
    "tests/pydirect/kernels/test_machine_code.py": {"_library"},
    "tests/ranks.py": {"_stop"},  # Python's own: a server of forks has no public one
    "tests/ssdtrain/cache/test_life.py": {"_records"},
    "tests/ssdtrain/cache/test_self_check.py": {"_rebuild"},
    "tests/ssdtrain/cache/test_window.py": {"_store"},
    "tests/ssdtrain/engines/hinted_ranks.py": {"_cache"},
    "tests/ssdtrain/megatron/test_host.py": {"_resident"},
    "tests/ssdtrain/races/perturb.py": {"_release"},
    "tests/ssdtrain/transfer/test_direct.py": {"_writers"},
    "tests/ssdtrain/transfer/test_fork.py": {"_changed", "_lock", "_mode", "_weights"},
    "tests/ssdtrain/transfer/test_transfer.py": {"_meters"},
}


MAY_REACH = re.compile(r"(?<!self)(?<!cls)\._[a-z]|^from .*\b_[a-z]|^ +_\w+,$", re.M)
"""In the text of a file: parsing all of them takes long."""


def private_names() -> set[str]:
    """Attributes, functions and classes of the product that begin with `_`."""
    found: set[str] = set()
    for path in product_files():
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
    return {n for n in found if n.startswith("_") and not n.startswith("__")}


def reaches(path: Path, private: set[str]) -> Iterator[str]:
    """Private names of the product that a file reads, writes or imports.

    Its own classes may have private attributes of the same name. Names given to
    `monkeypatch.setattr` as text are faults put in on purpose and do not count.
    """
    tree = tree_of(path)
    own = {fn.name for fn in functions(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                own.add(node.attr)
    theirs = private - own - FOREIGN
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in theirs:
            if not (isinstance(node.value, ast.Name) and node.value.id == "self"):
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module.split(".")[0] in PACKAGES:
                names = [a.name for a in node.names]
                yield from (n for n in names if n[0] == "_" and n[:2] != "__")


def test_tests_use_public_names() -> None:
    """A new reach fails, and so does a line of the list that nothing needs any more."""
    private, found = private_names(), {}
    for path in (ROOT / "tests").rglob("*.py"):
        if not MAY_REACH.search(path.read_text()):
            continue
        if names := set(reaches(path, private)):
            found[name(path)] = names
    for where in {*found, *STILL_REACHED}:
        new = found.get(where, set()) - STILL_REACHED.get(where, set())
        gone = STILL_REACHED.get(where, set()) - found.get(where, set())
        assert not new, (
            f"{where} reaches {sorted(new)}: use a public name (`session.cache` has "
            "the cache), or give the class one."
        )
        assert not gone, f"{where} no longer reaches {sorted(gone)}: shorten the list"


NOTE = re.compile(r"\[Note: ([^\]]+)\](?: in ([\w/]+\.\w+))?")
NAMED = re.compile(
    r"(?<![\w/.])(?:tests|ssdtrain|pydirect|hector)/[\w/]+\.(?:py|cu|c)\b"
)


def flowing(path: Path) -> str:
    """The text of a file without its line ends and comment marks."""
    return re.sub(r"\n\s*(?:#|//|\*)?\s*", " ", path.read_text())


def sources() -> list[Path]:
    return [*product_files(), *(ROOT / "pydirect").rglob("*.cu")]


def notes_of(path: Path) -> set[str]:
    """Titles of the notes that stand in a file: each begins a paragraph."""
    lines = [line.strip(" #/*") for line in path.read_text().splitlines()]
    starts = [
        line.removeprefix('"""')
        for before, line in zip(["", *lines], lines, strict=False)
        if not before or line.startswith('"""') or before.endswith('"""')
    ]
    return {found[1] for line in starts if (found := NOTE.match(line))}


def test_notes_that_are_cited_are_there() -> None:
    homes = {path: notes_of(path) for path in sources()}
    missing = []
    for path in sources():
        for note, file in NOTE.findall(flowing(path)):
            where = [home for home, notes in homes.items() if note in notes]
            if file:
                where = [home for home in where if home.match(file)]
            if not where:
                missing.append(f"{name(path)}: [Note: {note}] {file}")
    assert missing == []


def test_files_that_are_named_exist() -> None:
    pages = {*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")}
    # It names what was.
    pages -= {ROOT / "CHANGELOG.md"}
    texts = [*sources(), *sorted(pages)]
    named = {(path, file) for path in texts for file in NAMED.findall(flowing(path))}
    assert [(name(p), file) for p, file in named if not (ROOT / file).exists()] == []


def test_long_files_say_why() -> None:
    """docs/layout.md names every file of more than 500 lines, with its reason."""
    table = (ROOT / "docs" / "layout.md").read_text()
    long = [
        name(path) for path in all_files() if len(path.read_text().splitlines()) > 500
    ]
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("|")]
    listed = {file for row in rows for file in re.findall(r"`([^`]+)`", row)}
    unlisted = [file for file in long if file not in listed]
    assert unlisted == [], "give the reason in docs/layout.md, or split two concepts"
