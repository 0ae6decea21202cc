"""The mutants: a sample is killed here, all of them by `run_mutants` (a minute)."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from run_mutants import ROOT, Change, Mutant, Survived, all_mutants

# One of each kind: identity, order, verify, recipes, hooks.
SAMPLE = (
    "key_without_base",
    "reload_races_its_copy",
    "digest_without_positions",
    "recipe_hides_changes",
    "hooks_leak",
)


def test_a_sample_is_killed_and_no_change_survives() -> None:
    """The runner itself can fail."""
    code = (
        "import sys\n"
        "from dataclasses import replace\n"
        "from tests.pitfalls import run_mutants as r\n"
        "code = r.main(sys.argv[1:]); m = replace(r.all_mutants()[0], changes=())\n"
        "with r.copied() as place:\n"
        "  try: r.check(m, place)\n"
        "  except r.Survived: print('survived')\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *SAMPLE],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(SAMPLE)} of {len(SAMPLE)} killed\nsurvived\n" in done.stdout


def test_every_mutant_names_tests_that_exist() -> None:
    """And enough of them: the issue's five, and the recipes' three."""
    mutants = all_mutants()
    assert len(mutants) >= 45
    assert {
        "key_without_base",
        "conj_bit_dropped",
        "parameter_by_detach",
        "hooks_on_submodules",
        "recipe_wrong_input",
        "recipe_wrong_epsilon",
        "recipe_wrong_dtype",
    } <= {mutant.name for mutant in mutants}
    for mutant in mutants:
        assert mutant.killed_by, mutant.name
        for test in mutant.killed_by:
            path, _, function = test.partition("::")
            found = f"def {function.partition('[')[0]}("
            assert found in (ROOT / path).read_text(), f"{mutant.name}: {test}"


def test_every_anchor_stands_once() -> None:
    """Whoever changes a line that a mutant changes mends the mutant."""
    for mutant in all_mutants():
        for file in mutant.files:
            text = (ROOT / file).read_text()
            assert mutant.text_of(file, text) != text, mutant.name


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("one three", "stands 0 times in f.py"),
        ("one two two", "stands 2 times in f.py"),
        ("one two", ""),
    ],
)
def test_an_anchor_that_does_not_stand_once_is_told(text: str, told: str) -> None:
    mutant = Mutant("m", "", (), (Change("f.py", "two", "2"),))
    if not told:
        assert mutant.text_of("f.py", text) == "one 2"
        return
    with pytest.raises(Survived, match=told):
        mutant.text_of("f.py", text)


def test_anchors_are_sought_in_the_file_as_it_is() -> None:
    changes = (Change("f.py", "a", "b a"), Change("f.py", "b", "c"))
    assert Mutant("m", "", (), changes).text_of("f.py", "a b") == "b a c"
    changes = (Change("f.py", "a b", "x"), Change("f.py", "b c", "y"))
    with pytest.raises(Survived, match="overlap"):
        Mutant("m", "", (), changes).text_of("f.py", "a b c")
