"""The mutants: a sample is killed here, all of them by `run_mutants` (a minute)."""

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from run_mutants import ROOT, all_mutants, apply

# One of each kind: identity, order, verify, recipes, hooks.
SAMPLE = (
    "key_without_base",
    "conj_bit_dropped",
    "parameter_by_detach",
    "reload_races_its_copy",
    "digest_without_positions",
    "recipe_hides_changes",
    "hooks_leak",
)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.pitfalls.run_mutants", *arguments],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
    )


def test_a_sample_is_killed() -> None:
    done = run(*SAMPLE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(SAMPLE)} of {len(SAMPLE)} killed" in done.stdout


def test_every_mutant_names_tests_that_exist() -> None:
    """And enough of them: the issue's five, and the recipes' three."""
    names = {mutant.name for mutant in all_mutants()}
    assert len(names) >= 45
    assert {
        "key_without_base",
        "conj_bit_dropped",
        "parameter_by_detach",
        "hooks_on_submodules",
        "recipe_wrong_input",
        "recipe_wrong_epsilon",
        "recipe_wrong_dtype",
    } <= names
    for mutant in all_mutants():
        for test in mutant.tests:
            path, _, function = test.partition("::")
            assert f"def {function.partition('[')[0]}(" in (ROOT / path).read_text()


def test_every_mutant_applies() -> None:
    """Whoever changes a line that a mutant changes mends the mutant."""
    for mutant in all_mutants():
        apply(mutant, ROOT, check=True)


def test_a_mutant_that_changes_nothing_survives(tmp_path: Path) -> None:
    """The runner itself can fail."""
    code = (
        "from tests.pitfalls import run_mutants as r; from pathlib import Path\n"
        "r.preload(); m = r.all_mutants()[0]\n"
        "r.apply = lambda mutant, place: None\n"
        "try: r.check(m)\n"
        "except r.Survived: print('survived')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=280,
    )
    assert done.stdout == "survived\n"
