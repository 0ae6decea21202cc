"""Nobody draws from the user's random generators: plain training and training under
ssdtrain draw the same numbers."""

import ast
from pathlib import Path

import ssdtrain
from tests.arch.test_layers import nodes_of

ROOT = Path(ssdtrain.__file__).parent
OWN = {ROOT / "train" / "models", ROOT / "tools"}
"""Models of our own trainer, which draw their first weights, and programs."""
DRAWS = {
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like"),
    *("randint_like", "bernoulli", "multinomial", "normal", "bernoulli_", "normal_"),
    *("random_", "uniform_", "exponential_", "log_normal_", "cauchy_", "geometric_"),
}


def draws(path: Path) -> list[int]:
    """Lines in which torch would draw from a default generator."""
    found = []
    for node in nodes_of(path):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            names = {keyword.arg for keyword in node.keywords}
            if node.func.attr in DRAWS and "generator" not in names:
                found.append(node.lineno)
    return found


def test_nobody_draws_from_a_default_generator() -> None:
    paths = [path for path in ROOT.rglob("*.py") if not OWN & {*path.parents}]
    found = {str(path.relative_to(ROOT)): draws(path) for path in paths}
    assert len(found) > 200
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_a_draw_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "it.py"
    path.write_text("x = torch.randint(0, 9, (2,))\ny.random_(generator=g)\n")
    assert draws(path) == [1]
