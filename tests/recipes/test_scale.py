"""What several GPUs are measured with, on two ranks of a CPU."""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from recipes.bench.harness.cli import run
from recipes.bench.harness.records import read
from tests.ranks import own_server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("megatron") is None, reason="no megatron-core"),
]
WANTED = ("links", "fsdp2 x tp 4b/*", "megatron pp2/*", "collectives", "tiering")


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
    assert all(any(fnmatchcase(name, each) for name in cells) for each in names)
    for layout in ("fsdp2 x tp 4b", "megatron pp2"):
        ways: dict[str, Any] = {
            way: cells[f"2 ranks/{layout}/{way}"]
            for way in ("law", "gc", "plain", "=gc", "fit")
        }
        assert all(found["step_ms"] > 0 for way, found in ways.items() if way != "law")
    assert cells["2 ranks/fsdp2 x tp 4b/law"]["equal"]
    assert cells["2 ranks/fsdp2 x tp 4b/law"]["reruns"]
    assert cells["2 ranks/megatron pp2/law"]["host_equal"]
    assert all(len(cells["2 ranks/links"][way]) == 2 for way in ("out", "in", "both"))
    assert cells["2 ranks/tiering"]["speedup"] > 0
    assert len(cells["2 ranks/collectives"]["links"]) > 20
    before = out.read_bytes()
    assert run([*words, "--only", *names]) == 0
    assert out.read_bytes() == before, "a rerun goes on"
