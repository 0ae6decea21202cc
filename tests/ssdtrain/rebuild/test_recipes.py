"""Every recipe: it is used, it is bitwise, and its mutants are caught."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ssdtrain import api
from ssdtrain.cache.rebuilder import Rebuilder
from ssdtrain.errors import ActivationChangedError
from ssdtrain.rebuild.dropout import MASK, Draws
from ssdtrain.rebuild.expression import Expression, GeneratorState
from ssdtrain.rebuild.finder import Finder
from ssdtrain.rebuild.node import Producer, RecipeBuilder
from ssdtrain.rebuild.recipes import rules_of

sys.path.insert(0, str(Path(__file__).parent))
from recipe_cases import (
    CASES,
    REFUSED,
    Case,
    Expanded,
    MatrixTransposed,
    Permuted,
    Transposed,
    Unsqueezed,
    calls,
    run,
)

Function = Callable[..., Tensor]
ALONE = {"plan": "keep-all", "min_bytes": 0}
OFFLOADING = {"plan": "offload-all", "min_bytes": 0, "window_bytes": 1}


@pytest.mark.parametrize("settings", [ALONE, OFFLOADING], ids=["alone", "offloading"])
@pytest.mark.parametrize("name", CASES)
def test_rebuilds_the_same_bytes(name: str, settings: dict[str, Any]) -> None:
    case = CASES[name]
    registered = {MASK, *built_in()}
    assert case.recipe in registered, f"no recipe is registered for {case.recipe}"
    ours, theirs = run(case, **settings), run(case)
    (report,) = ours.reports
    assert report.recipes[case.recipe] > 0
    assert report.recipe_ms[case.recipe] > 0
    assert not report.fallbacks
    assert ours.equals(theirs)


def wrong_input(function: Function) -> Function:
    def mutant(*operands: Any, **constants: Any) -> Tensor:
        first, *rest = operands
        if isinstance(first, GeneratorState):
            # Somebody has drawn in between.
            first = GeneratorState(torch.Generator().manual_seed(9).get_state())
        else:
            first = first.flip(0)
        return function(first, *rest, **constants)

    return mutant


def wrong_dtype(function: Function) -> Function:
    def mutant(*operands: Any, **constants: Any) -> Tensor:
        return function(*operands, **constants).to(torch.float64)

    return mutant


def wrong_precision(function: Function) -> Function:
    def mutant(*operands: Any, **constants: Any) -> Tensor:
        made = function(*operands, **constants)
        return made.to(torch.float8_e4m3fn).to(made.dtype)

    return mutant


def wrong_epsilon(function: Function) -> Function:
    def mutant(*operands: Any, epsilon: float, **constants: Any) -> Tensor:
        return function(*operands, epsilon=epsilon * 1.5, **constants)

    return mutant


def built_in() -> dict[str, RecipeBuilder]:
    """Recipes that no plan has to weigh."""
    rows = rules_of(weighed=False).items()
    return {name: row.recipe for name, row in rows if row.recipe is not None}


def use(monkeypatch: pytest.MonkeyPatch, name: str, recipe: RecipeBuilder) -> None:
    """Make sessions use this recipe."""
    rows = rules_of(weighed=False)
    rows[name] = rows[name]._replace(recipe=recipe)
    monkeypatch.setattr(api, "Finder", lambda *args, **kwargs: Finder(rows))


def plant(
    monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[Function], Function]
) -> None:
    """Make sessions use a mutant of this recipe."""

    def mutated(found: Expression | None) -> Expression | None:
        if found is None:
            return None
        return replace(found, function=change(found.function))

    if name == MASK:
        draw = Draws.expression
        monkeypatch.setattr(Draws, "expression", lambda s, t: mutated(draw(s, t)))
        return
    recipe = built_in()[name]
    use(monkeypatch, name, lambda node: mutated(recipe(node)))


MUTANTS: list[tuple[str, Callable[[Function], Function]]] = [
    (name, change)
    for name in CASES
    for change in (wrong_input, wrong_dtype, wrong_precision)
] + [("layer norm", wrong_epsilon)]
IDS = [f"{name}-{change.__name__}" for name, change in MUTANTS]


@pytest.mark.parametrize(("name", "change"), MUTANTS, ids=IDS)
def test_mutants_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[Function], Function]
) -> None:
    case = CASES[name]
    theirs = run(case)
    plant(monkeypatch, case.recipe, change)
    ours = run(case, **ALONE)
    (report,) = ours.reports
    assert report.fallbacks[REFUSED] > 0
    assert case.recipe not in report.recipes
    assert ours.equals(theirs)


@pytest.mark.parametrize(("name", "change"), MUTANTS, ids=IDS)
def test_mutants_let_through_break_the_law(
    monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[Function], Function]
) -> None:
    """The tests above would notice a wrong recipe that admission does not see."""
    case = CASES[name]
    theirs = run(case)
    plant(monkeypatch, case.recipe, change)
    monkeypatch.setattr(Rebuilder, "_check", lambda *args: True)
    if change is wrong_dtype:
        with pytest.raises(RuntimeError, match="its recipe made"):
            run(case, **ALONE)
    else:
        try:
            broken = not run(case, **ALONE).equals(theirs)
        except ActivationChangedError:
            broken = True  # the self-check drew it
        assert broken


def test_every_built_in_recipe_has_a_case() -> None:
    views = {"Transpose", "Expand", "T", "Permute", "Unsqueeze", "Alias"}
    views |= {"View", "UnsafeView", "ReshapeAlias", "ViewAs"}
    without = {f"{name}Backward0" for name in views}
    # Produced on CUDA only.
    without |= {"FusedRmsNormBackward0", "NativeDropoutBackward0"}
    known = set(built_in())
    assert known - without <= {case.recipe for case in CASES.values()}
    assert without <= known


@pytest.mark.parametrize("name", CASES)
def test_every_constant_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A constant that a recipe leaves out is right as long as it has its default."""
    case = CASES[name]
    recipe = built_in().get(case.recipe)
    if recipe is None:
        assert case.recipe == MASK
        return
    kept: set[tuple[str, str]] = set()
    asked: set[tuple[str, str]] = set()
    constant = Producer.constant

    def ask(self: Producer, what: str) -> Any:
        asked.add((self.name, what))
        return constant(self, what)

    def look(node: Producer) -> Expression | None:
        names = dir(node.node)
        kept.update(
            (node.name, each.removeprefix("_saved_"))
            for each in names
            if each.startswith("_saved_") and f"_raw{each}" not in names
        )
        return recipe(node)

    monkeypatch.setattr(Producer, "constant", ask)
    use(monkeypatch, case.recipe, look)
    run(case, **ALONE)
    assert kept <= asked


@pytest.mark.parametrize(
    "module", [Transposed, Permuted, Expanded, Unsqueezed, MatrixTransposed]
)
def test_views_between_producer_and_copy(module: Callable[[], nn.Module]) -> None:
    case = Case("CloneBackward0", calls(module()))
    ours = run(case, **ALONE)
    assert ours.reports[0].recipes["CloneBackward0"] > 0
    assert ours.equals(run(case))
