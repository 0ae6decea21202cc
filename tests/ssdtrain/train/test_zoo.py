"""The law for every family on every DeepSpeed host, on two real ranks (gloo): losses
and weights are equal bit by bit, bytes were moved, and less was alive."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.ssdtrain.train.zoo_worker import TIERED

pytest.importorskip("deepspeed")

HERE = Path(__file__).parent
FAMILIES = ("gpt", "bert", "t5")
Cells = dict[str, list[dict[str, Any]]]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Cells:
    """All cells from one launch: starting DeepSpeed costs more than training."""
    directory = tmp_path_factory.mktemp("zoo")
    text = directory / "text.txt"
    text.write_text("".join(chr(33 + i * 7 % 90) for i in range(20000)))
    out = directory / "cells.json"
    run_ranks([HERE / "zoo_worker.py", out, directory, text], directory, limit_s=560)
    return json.loads(out.read_text())


@pytest.mark.parametrize(
    ("family", "host", "target"),
    [
        *itertools.product(FAMILIES, ("pipeline", "zero3"), ["ssd"]),
        *(("bert", "zero1", "ssd"), ("t5", "zero2", "ssd")),
        *((*each, "tiered") for each in TIERED),
    ],
)
def test_law(cells: Cells, family: str, host: str, target: str) -> None:
    pairs = zip(
        cells[f"{family} {host} none"], cells[f"{family} {host} {target}"], strict=True
    )
    for without, with_ in pairs:
        assert with_["losses"] == without["losses"]
        assert with_["weights"] == without["weights"]
        assert len(set(with_["losses"])) == 2  # it does train
        assert with_["bytes_offloaded"] > 0
        assert with_["bytes_reloaded"] > 0
        assert with_["peak_bytes"] < without["peak_bytes"]
    # A stage whose tensors all fit into the host tier writes nothing.
    assert sum(rank["bytes_written"] for rank in cells[f"{family} {host} {target}"])


@pytest.mark.parametrize("target", ["host", "ssd full"])
def test_zero_3_with_everything_offloaded(cells: Cells, target: str) -> None:
    """Every saved tensor leaves, with every recipe and without any."""
    for without, with_ in zip(
        cells["gpt zero3 none"], cells[f"gpt zero3 {target}"], strict=True
    ):
        assert with_["losses"] == without["losses"]
        assert with_["weights"] == without["weights"]
        assert with_["bytes_offloaded"] > 0
        assert with_["peak_bytes"] < without["peak_bytes"]
        assert with_["gathered_bytes"] == without["gathered_bytes"]


@pytest.mark.parametrize("family", FAMILIES)
def test_zero_3_moves_what_zero_0_moves(cells: Cells, family: str) -> None:
    for zero0, zero3 in zip(
        cells[f"{family} zero0 ssd"], cells[f"{family} zero3 ssd"], strict=True
    ):
        assert zero3["bytes_saved"] == zero0["bytes_saved"]
        assert zero3["bytes_offloaded"] == zero0["bytes_offloaded"]


@pytest.mark.parametrize(
    ("family", "target"), [*((family, "ssd") for family in FAMILIES), ("gpt", "tiered")]
)
def test_zero_3_lets_go_of_gathered_parameters(
    cells: Cells, family: str, target: str
) -> None:
    for without, with_ in zip(
        cells[f"{family} zero3 none"], cells[f"{family} zero3 {target}"], strict=True
    ):
        assert len(with_["gathered_bytes"]) == 4  # two steps of two micro-batches
        assert with_["gathered_most"] == without["gathered_most"] > 0
        assert with_["gathered_bytes"] == without["gathered_bytes"]
