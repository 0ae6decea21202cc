"""Mini-batch epochs beside PyG's: one contender's failure takes no other away."""

import argparse
import multiprocessing
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.bench.harness import records
from recipes.bench.harness.cells import NOT_ENDED, Cells
from recipes.bench.harness.cli import Bench, run
from recipes.bench.rgnn import epochs, mag

TINY = ["--shrink", "20000", "--batches", "3", "--workers", "0"]


def cells_of(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = records.read(out)["cells"]
    return found


class Batch:
    """What a loader of PyG's gives."""

    def __init__(self) -> None:
        self.streams: list[object] = []

    def pin_memory(self) -> "Batch":
        return self

    def to(self, *_: object, **__: object) -> "Batch":
        return self

    def record_stream(self, stream: object) -> None:
        self.streams.append(stream)


def test_prefetched_batches_are_known_to_the_stream_that_reads_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The allocator may not give their memory to the next copies before that."""
    pytest.importorskip("torch_geometric")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: "reads")
    batches = [Batch() for _ in range(3)]
    assert list(mag.Prefetched(batches, torch.device("cpu"))) == batches
    assert not batches[0].streams
    with warnings.catch_warnings():  # PyG says that there is no GPU
        warnings.simplefilter("ignore")
        seen = iter(mag.Prefetched(batches, torch.device("cuda")))
        first = next(seen)
    assert first.streams == ["reads"], "before the step that reads it"
    assert [b.streams for b in [first, *seen]] == [["reads"]] * 3


def test_a_way_that_fails_is_a_cell_and_the_others_have_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Loader:
        """One batch of the whole graph; `_end_workers` looks into it."""

        def __init__(self, data: mag.Data) -> None:
            self.loader, self._data = self, data

        def __iter__(self) -> Iterator[Any]:
            whole = argparse.Namespace(
                x=self._data.rows,
                y=self._data.goal,
                edge_index=self._data.edges,
                edge_type=self._data.kinds,
                batch_size=4,
            )
            return iter([whole])

    def loaders(kind: str, data: mag.Data, workers: int, inside: bool) -> Loader:
        if not inside:
            raise ImportError("no sampler")
        return Loader(data)

    pytest.importorskip("torch_geometric")
    started: list[object] = []

    def method(name: str, force: bool) -> None:
        started.append((name, force))

    monkeypatch.setattr(multiprocessing, "set_start_method", method)
    monkeypatch.setattr(epochs, "loaders", loaders)
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    out = tmp_path / "epochs.json"
    own = Bench(out), 300.0, 20_000, 3, ("rgcn",), (0,)
    assert epochs.run_cells(*own) == ""
    assert started == [("fork", True)], "workers share the graph's memory"
    cells = cells_of(out)
    assert "no sampler" in cells["rgcn/pyg, as they are, 0 workers, rows here"]["error"]
    ways = [
        f"rgcn/pyg, {way}, 0 workers" for way in ("as they are", "fast", "compiled")
    ]
    assert all(cells[way]["epoch_s"] > 0 for way in ways)
    assert cells["rgcn/ratio"]["ratio"] > 0 and cells["rgcn/ours"]["draws_equal"]
    assert cells["rgcn/losses"]["float64"] <= 1e-12


def test_a_broken_device_ends_the_process_behind_its_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "epochs.json"
    campaign = epochs.Campaign(
        mag.Data(torch.device("cpu"), 20_000, 3), Cells(out, 300.0)
    )

    def broken(device: torch.device) -> float:
        raise torch.AcceleratorError("device-side assert triggered")

    def assertion() -> dict[str, Any]:
        raise RuntimeError("device-side assert triggered")

    assert campaign.take("fine", dict, 9.0).keys() == {"cell_s"}
    monkeypatch.setattr(epochs, "wait", broken)
    with pytest.raises(epochs.BrokenDeviceError, match="rgat/pyg"):
        campaign.take("rgat/pyg", assertion, 9.0)
    assert "assert" in cells_of(out)["rgat/pyg"]["error"]
    monkeypatch.undo()
    assert "assert" in campaign.take("rgat/pyg", dict, 9.0)["error"], "not run again"


def test_a_new_process_goes_on_behind_one_that_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "epochs.json"
    ends = iter([(None, "the process ended with -11"), ("x broke the device", ""),
                 ("", "")])  # fmt: skip

    def guarded(run: Any, own: Bench, left_s: float, *_: Any, **__: Any) -> Any:
        cells = Cells(own.out, left_s, {**epochs.ABOUT, "shrink": 20_000})
        cells.note(f"cell {len(cells.data['cells'])}", {"draw_ms": 1.0})
        return next(ends)

    monkeypatch.setattr(epochs, "guarded", guarded)
    assert run(["rgnn.epochs", *TINY, "--out", str(out)]) == 0
    assert next(ends, None) is None, "all three processes"
    assert cells_of(out)["cell 0"] == {
        "draw_ms": 1.0,
        "error": "the process ended with -11",
    }
    assert cells_of(out)["cell 1"]["error"] == NOT_ENDED


def test_a_process_that_dies_outside_its_cells_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    died = (None, "the process ended with 1")
    monkeypatch.setattr(epochs, "guarded", lambda *_, **__: died)
    assert run(["rgnn.epochs", *TINY, "--out", str(tmp_path / "epochs.json")]) == 1
