"""What several GPUs are measured with, on two ranks of a CPU."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from recipes.bench.harness.cli import run
from recipes.bench.harness.records import read
from recipes.bench.megatron.tables import scale
from tests.ranks import own_server

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of megatron-core, on import
    pytest.mark.slow,
    pytest.mark.skipif(
        not find_spec("megatron"),
        reason="no megatron-core",
    ),
]
LAYOUTS: dict[str, tuple[str, ...]] = {
    "fsdp2 4b": ("law", "gc", "plain", "=gc", "fit"),
    "megatron pp": ("law", "gc"),
}
WANTED = (
    *("links", "bert 8192/estimate"),
    *(f"{layout}/{way}" for layout, ways in LAYOUTS.items() for way in ways),
)


@pytest.fixture(autouse=True, scope="module")
def server() -> Iterator[None]:
    """The one that ranks of other tests come from imports none of ours."""
    with own_server():
        yield


def test_every_kind_of_cell_runs_on_two_ranks(tmp_path: Path) -> None:
    out = tmp_path / "scale.json"
    words = ["megatron.scale", "--tiny", "--out", str(out), "--budget-s", "240"]
    names = [f"2 ranks/{name}" for name in WANTED]
    assert run([*words, "--only", *names]) == 0
    cells = read(out)["cells"]
    assert not {name: cell["error"] for name, cell in cells.items() if "error" in cell}
    assert cells.keys() == set(names)
    for layout, ways in LAYOUTS.items():
        assert all(cells[f"2 ranks/{layout}/{way}"]["step_ms"] > 0 for way in ways[1:])
    assert "| 2 ranks/fsdp2 4b |" in scale({"cells": cells})
    assert cells["2 ranks/fsdp2 4b/law"]["equal"]
    assert cells["2 ranks/fsdp2 4b/law"]["reruns"]
    assert cells["2 ranks/megatron pp/law"]["host_equal"]
    assert min(cells["2 ranks/bert 8192/estimate"]["offloaded_gib"]) > 0
    assert all(len(cells["2 ranks/links"][way]) == 2 for way in ("out", "in", "both"))
    before = out.read_bytes()
    assert run([*words, "--only", *names]) == 0
    assert out.read_bytes() == before, "a rerun goes on"
