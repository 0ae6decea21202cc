"""Megatron-Core on two real gloo ranks: bitwise equal, bytes moved, all restored."""

import json
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ssdtrain.tools.foresight.collectives import straight_fabric
from ssdtrain.tools.foresight.device import bare_device
from ssdtrain.tools.foresight.graph import read_graph
from ssdtrain.tools.foresight.ranks import estimate_graphs
from ssdtrain.tools.foresight.wires import Wires
from tests.ranks import run_ranks

SCRIPT = Path(__file__).with_name("law_ranks.py")
ROOT = Path(__file__).resolve().parents[3]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(850),  # seconds of work, but two cores are often shared
    pytest.mark.skipif(
        find_spec("megatron") is None, reason="megatron-core is not installed"
    ),
]


def every_cell(out: Path) -> list[dict[str, Any]]:
    # megatron-core warns of Apex and Transformer Engine at import.
    run_ranks([SCRIPT, out], out, limit_s=800, PYTHONWARNINGS="ignore")
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]


def check_target(name: str, target: str, result: dict[str, Any]) -> None:
    assert result["losses"], (name, target)
    assert result["gradients"], (name, target)
    assert result["weights"], (name, target)
    assert result["restored"], (name, target, "close() left something behind")
    assert result["idle"] and result["live"] == 0, (name, target)
    assert len(result["reports"]) == 2, (name, "a schedule is a step")
    for report in result["reports"]:
        moved = report["bytes_offloaded"] + report["bytes_recomputed"]
        assert moved > 0.9 * report["bytes_saved"], (name, target, report)
        assert report["bytes_reloaded"] > 0, (name, target)
        assert not report["fallbacks"], (name, target, report)
        if target == "ssd":
            # The first step cannot know which save of a tensor is the last.
            again = report["bytes_written"] - report["bytes_offloaded"]
            assert again >= 0 if report["step"] == 0 else again == 0, name


def check_plans(ranks: list[dict[str, Any]]) -> None:
    """Ranks of one layer follow one plan; stages plan by themselves."""
    one, other = (rank["gpt, tp 2"]["plan"] for rank in ranks)
    assert one == other
    assert not any(one["fallbacks"])
    first, last = (rank["gpt, 1f1b"]["plan"] for rank in ranks)
    assert first["marks_ms"] != last["marks_ms"]
    assert first["lanes"] == last["lanes"] == 4


def check_captured(out: Path) -> None:
    """Foresight's graphs of pipelined, tensor-parallel and wrapped steps, and their
    price together."""
    device = replace(bare_device("h100"), host_scale=0.0)
    wires = Wires(fabric=straight_fabric(10.0, 100.0))
    for name in ("gpt, 1f1b", "gpt, tp 2", "distributed optimizer"):
        ranks = [read_graph(out / f"{name}.graph{rank}.json") for rank in range(2)]
        kinds = [
            Counter(n.attr["collective"] for n in g.nodes if "collective" in n.attr)
            for g in ranks
        ]
        phases = [Counter(node.phase for node in graph.nodes) for graph in ranks]
        assert all(count > 10 for own in phases for count in own.values()), name
        found = estimate_graphs(ranks, device, wires)
        if name == "gpt, 1f1b":
            for mine, other in (ranks, ranks[::-1]):
                sent = [n.attr["signal"] for n in mine.nodes if "signal" in n.attr]
                got = [
                    n.attr["waits_for"] for n in other.nodes if "waits_for" in n.attr
                ]
                assert sent == got and len(sent) == 4  # micro-batches
            # The last stage waits for the first: half a bubble of 1 / (4 + 1).
            assert found.step_us > 1.05 * found.alone_us
        else:
            assert kinds[0] == kinds[1]
            word = "all_reduce" if name == "gpt, tp 2" else "reduce_scatter"
            assert kinds[0][word] > 0, name
            assert found.step_us >= found.alone_us


def test_law_on_two_ranks(tmp_path: Path) -> None:
    ranks = every_cell(tmp_path)
    assert len(ranks[0]) == 11 + 7
    check_plans(ranks)
    check_captured(tmp_path)
    num_ssd = 0
    for rank, cells in enumerate(ranks):
        for name, cell in cells.items():
            assert cell["num_gradients"] > 10, name
            targets = [target for target in ("host", "ssd") if target in cell]
            num_ssd += len(targets) - 1
            for target in targets:
                check_target(f"{name} on rank {rank}", target, cell[target])
            if "interleaved" in name or ("1f1b" in name and rank == 0):
                assert cell["host"]["prefetched"] > 0, f"{name}: nothing while waiting"
        assert not list((tmp_path / f"ssd{rank}").iterdir()), "files left behind"
    assert num_ssd == 2 * 10
