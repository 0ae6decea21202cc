"""The scripts of docs/trainers.md that start again: Accelerate, and Ray Train with its
wheel if it is there (`make integrations`), else with a stand-in.

Each runs as the page shows it, but for its settings: a CPU has no memory to fit.
"""

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT, blocks
from tests.ssdtrain.integrations.scripts import ONLY, digest_of, run
from tests.ssdtrain.integrations.test_trainers import paths

BUDGET = 50_000
FIT = 'device_memory="fit" if torch.cuda.is_available() else None'
PLANNED = f"memory_budget_bytes={BUDGET}, min_bytes=0"


def page(imported: str, settings: str) -> str:
    """The block of the page that imports this, with other settings."""
    found = [
        block.text
        for block in blocks(ROOT / "docs" / "trainers.md")
        if f"\n{imported}" in block.text
    ]
    [text] = found
    assert text.count(FIT) == 1
    return text.replace(FIT, settings)


@pytest.mark.skipif(ONLY is not None, reason="in the test environment")
def test_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")

    def twice(settings: str) -> list[dict[str, Any]]:
        directory = tmp_path / settings.partition("=")[0]
        directory.mkdir()
        monkeypatch.chdir(directory)
        found = []
        for _ in range(2):
            names: dict[str, Any] = {"__name__": "__main__"}
            with contextlib.redirect_stdout(io.StringIO()):
                exec(page("from accelerate", settings), names)
            peaks = [each.saved_peak_bytes for each in names["session"].steps]
            found.append({"weights": digest_of(names["model"]), "peaks": peaks})
        return found

    ours, plain = twice(PLANNED), twice("plan='keep-all'")
    check_restart(ours[0]["peaks"], ours[1]["peaks"])
    assert [each["weights"] for each in ours] == [each["weights"] for each in plain]
    assert ours[0]["weights"] != ours[1]["weights"]


def check_restart(first: list[int], again: list[int]) -> None:
    """The first start observes a step above the budget, the second one none."""
    assert first[0] > BUDGET and len(first) == len(again) == 8
    assert 0 < max(again) <= BUDGET


KILLED = """        if epoch == 1 and first == 0:
            raise RuntimeError("killed")
"""
LEAVES = """    if ray.train.get_context().get_world_rank() == 0:
        import json
        from tests.ssdtrain.integrations.scripts import digest_of
        peaks = [each.saved_peak_bytes for each in session.steps]
        found = {"weights": digest_of(model), "peaks": peaks}
        with open("OUT", "w") as file:
            json.dump(found, file)
    session.close()
"""


@pytest.mark.slow
@pytest.mark.skipif(ONLY not in (None, "ray"), reason=f"SSDTRAIN_INTEGRATION={ONLY}")
def test_ray(tmp_path: Path) -> None:
    def killed_once(settings: str) -> dict[str, Any]:
        text = page("import ray", settings)
        loop, close = "        for batch in", "    session.close()\n"
        assert text.count(loop) == 1 == text.count(close)
        text = text.replace(loop, KILLED + loop).replace(close, LEAVES)
        text = text.replace("OUT", str(tmp_path / "out.json"))
        return run(text, tmp_path, PYTHONPATH=paths("ray"))

    ours, plain = killed_once(PLANNED), killed_once("plan='keep-all'")
    assert len(ours["peaks"]) == 8 and 0 < max(ours["peaks"]) <= BUDGET
    assert ours["weights"] == plain["weights"]
