"""The DeepSpeed pipeline engine: two real ranks on gloo, bitwise equal."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.utils.checkpoint

from ssdtrain.engines import deepspeed
from ssdtrain.errors import AttachError
from ssdtrain.tools.foresight.collectives import straight_fabric
from ssdtrain.tools.foresight.device import bare_device
from ssdtrain.tools.foresight.graph import read_graph
from ssdtrain.tools.foresight.overheads import StepPhase
from ssdtrain.tools.foresight.ranks import estimate_graphs
from ssdtrain.tools.foresight.wires import Wires
from tests.ranks import run_ranks
from tests.ssdtrain.targets import TARGETS

SCRIPT = Path(__file__).with_name("pipeline_ranks.py")


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What both stages left, of every target: starting DeepSpeed costs the most."""
    out = tmp_path_factory.mktemp("pipeline")
    run_ranks([SCRIPT, out], out)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_pipeline_is_bitwise_equal(pipeline: Path, target: str) -> None:
    for rank in range(2):
        result = json.loads((pipeline / f"rank{rank}.json").read_text())
        ours, theirs = result[target], result["without"]
        assert ours["losses"] == theirs["losses"]
        assert ours["parameters"] == theirs["parameters"]
        assert ours["attributes"] == theirs["attributes"], "left behind by close()"
        reports = ours["reports"]
        assert len(reports) == 3
        for report in reports:
            # What recipes rebuild has nothing to store.
            stored = report["bytes_saved"] - report["bytes_recomputed"]
            assert report["bytes_recomputed"] > 0
            assert report["bytes_offloaded"] > 0.5 * stored, rank
            assert report["bytes_reloaded"] > 0
            # Two micro-batches are in flight on the first stage, one on the last.
            assert report["saved_backward_start_bytes"] < 0.3 * report["bytes_saved"]
        if target != "host":
            left = list((pipeline / f"{target}{rank}").iterdir())
            assert not left, "files left behind"


@pytest.mark.slow
def test_captured_stages_wait_for_one_another(pipeline: Path) -> None:
    """Foresight's graphs of both stages: what one sends the other gets, and the step of
    both is longer than either's."""
    ranks = [read_graph(pipeline / f"graph{rank}.json") for rank in range(2)]
    for mine, other in (ranks, ranks[::-1]):
        sent = [n.attr["signal"] for n in mine.nodes if "signal" in n.attr]
        got = [n.attr["waits_for"] for n in other.nodes if "waits_for" in n.attr]
        assert sent == got and len(sent) >= 4
        assert {node.phase for node in mine.nodes} == set(StepPhase)
    wires = Wires(fabric=straight_fabric(10.0, 100.0))
    found = estimate_graphs(ranks, bare_device("h100"), wires)
    assert found.step_us > found.alone_us


def test_unknown_engine_is_refused() -> None:
    def _exec_schedule(pipe_schedule: object, extra: object) -> None: ...

    engine = SimpleNamespace(_exec_schedule=_exec_schedule)
    with pytest.raises(AttachError, match="tested versions"):
        deepspeed.check(engine)


def test_checkpointing_that_hides_its_inputs_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    checkpointing = pytest.importorskip(
        "deepspeed.runtime.activation_checkpointing.checkpointing"
    )
    hidden = {
        "activation_checkpoint_interval": 1,
        "activation_checkpoint_func": checkpointing.checkpoint,
    }
    seen = {**hidden, "activation_checkpoint_func": torch.utils.checkpoint.checkpoint}
    unused = {**hidden, "activation_checkpoint_interval": 0}
    for module, num_warnings in ((hidden, 1), (seen, 0), (unused, 0)):
        caplog.clear()
        deepspeed.warn_of_checkpointing(SimpleNamespace(**module))
        assert len(caplog.records) == num_warnings
