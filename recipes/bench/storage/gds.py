"""GPU memory to SSD on every path, against a raw loop, and the automatic choice.

python -m recipes.bench storage.gds --directory /mnt/nvme0 --budget-s 300
"""

import statistics
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from recipes.bench.harness.cells import Cells
from recipes.bench.harness.cli import Bench, UsageError
from recipes.bench.storage.raw_io import RawFile, aligned_buffers, gb_per_s, scratch
from ssdtrain.storage import PosixStorage, Storage
from ssdtrain.storage.gds import GdsStorage
from ssdtrain.storage.kvikio_shim import (
    KvikioFile,
    availability,
    kvikio_version,
    set_threads,
)
from ssdtrain.storage.measure import STAGED_POSIX, StagedPath, as_one, choose_path

MIB = 1024 * 1024


def probe_modes(directory: Path) -> dict[str, Any]:
    """What kvikio says, and how it opens files, in its own words."""
    found = availability()
    facts: dict[str, Any] = {
        "modes": [mode.value for mode in found.modes],
        "refusals": {r.mode.value: r.reason for r in found.refusals},
        "nvidia_fs": Path("/proc/driver/nvidia-fs").exists(),
    }
    if not found.modes:
        return facts
    facts["kvikio"] = ".".join(map(str, kvikio_version()))
    named = directory / "named"
    named.write_bytes(bytes(MIB))
    posix = PosixStorage(directory)
    for mode in found.modes:
        paths = (("name", str(named)), ("fd", f"/proc/self/fd/{posix.fileno()}"))
        for kind, path in paths:
            try:
                KvikioFile(path, mode).close()
                facts[f"{mode.value} opens by {kind}"] = True
            except OSError as error:
                facts[f"{mode.value} opens by {kind}"] = str(error)
    posix.close()
    named.unlink()
    return facts


class Paths:
    """All paths from GPU buffers to the disk, over the same number of records."""

    def __init__(self, place: Path, record_mib: int, depth: int) -> None:
        self.record_bytes = record_mib * MIB
        self.num_records = 2 * depth
        self.depth = depth
        self._close: list[Callable[[], None]] = []
        self.calls: dict[str, tuple[Any, Any]] = {}
        self.failures: dict[str, str] = {}
        raw = RawFile(place, self.num_records, self.record_bytes)
        self._close.append(raw.close)
        self.host = aligned_buffers(depth, self.record_bytes)
        self.device = [buffer.cuda() for buffer in self.host]
        self.calls["raw"] = (raw.write, raw.read)
        for num in (1, 2):
            name = STAGED_POSIX if num == 1 else "stripe of 2"
            self._add(name, self._staged(place, num))
        set_threads(8)
        for mode in availability().modes:
            posix = PosixStorage(place)
            try:
                storage = GdsStorage(posix, mode)
            except OSError as error:
                self.failures[mode.value] = str(error)
                posix.close()
                continue
            self._add(mode.value, (storage, storage))

    def _staged(self, place: Path, num: int) -> tuple[Storage, StagedPath]:
        places = [place / f"member{i}" for i in range(num)] if num > 1 else [place]
        for member in places:
            member.mkdir(exist_ok=True)
        storage = as_one([PosixStorage(member) for member in places])
        return storage, StagedPath(storage, self.record_bytes)

    def _add(self, name: str, made: tuple[Any, Any]) -> None:
        storage, path = made
        slots = [storage.allocate(self.record_bytes) for _ in range(self.num_records)]
        self._close.append(storage.close)
        self.calls[name] = (
            lambda block, buffer: path.write(slots[block], buffer),
            lambda block, buffer: path.read(slots[block], buffer),
        )

    def round(self, name: str) -> tuple[float, float]:
        """GB/s of a write and a read of all records."""
        write, read = self.calls[name]
        buffers = self.host if name == "raw" else self.device
        return (
            gb_per_s(write, self.num_records, buffers),
            gb_per_s(read, self.num_records, buffers),
        )

    def close(self) -> None:
        """Close all storages."""
        for close in self._close:
            close()


def path_cells(
    paths: Paths, num_rounds: int, left_s: Callable[[], float]
) -> list[dict[str, Any]]:
    """Alternate rounds over all paths; each path's ratio to the raw loop beside it."""
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in paths.calls}
    for turn in range(1 + num_rounds):
        if left_s() < 30:
            break
        names = list(seen) if turn % 2 == 0 else list(seen)[::-1]
        for name in names:
            try:
                rates = paths.round(name)
            except Exception as error:
                paths.failures[name] = "".join(traceback.format_exception_only(error))
                del seen[name]
                continue
            if turn:
                seen[name].append(rates)
    cells = [{"what": "path", "path": n, "error": e} for n, e in paths.failures.items()]
    for name, rounds in seen.items():
        cell: dict[str, Any] = {"what": "path", "path": name, "rounds": len(rounds)}
        for at, what in enumerate(("write", "read")):
            ours = [r[at] for r in rounds]
            raw = [r[at] for r in seen["raw"]][: len(ours)]
            cell[f"{what}_gb_per_s"] = round(statistics.median(ours), 3)
            ratio = statistics.median(a / b for a, b in zip(ours, raw, strict=True))
            cell[f"{what}_ratio"] = round(ratio, 3)
        cells.append(cell)
    return cells


def choice_cell(place: Path, cells: list[dict[str, Any]]) -> dict[str, Any]:
    """What the automatic choice takes, and how far that is from the best path."""
    posix = PosixStorage(place)
    choice = choose_path([posix], torch.device("cuda"))
    trip = {
        c["path"]: 1 / (1 / c["write_gb_per_s"] + 1 / c["read_gb_per_s"])
        for c in cells
        if c.get("what") == "path" and "error" not in c and c["path"] != "raw"
    }
    single = {name: rate for name, rate in trip.items() if name != "stripe of 2"}
    cell = {
        "what": "automatic choice",
        "path": choice.path,
        "why": choice.explain(),
        "of_best": round(single.get(choice.path, 0) / max(single.values()), 3),
        "probe": [r._asdict() for r in choice.rates],
    }
    choice.members[0].close()
    return cell


def path_parts(record: Cells, place: Path, num_rounds: int) -> None:
    """What the paths reach, and which one is taken by itself."""
    record.fact("modes", probe_modes(place))
    paths = Paths(place, record_mib=64, depth=4)
    for cell in path_cells(paths, num_rounds, record.left_s):
        record.add(**cell)
    paths.close()
    cells = list(record.data["cells"].values())
    record.attempt("choice", lambda: record.add(**choice_cell(place, cells)))


def main(bench: Bench, *, directory: Path = Path("."), rounds: int = 9) -> None:
    """All cells, within the budget."""
    if not torch.cuda.is_available():
        raise UsageError("needs a CUDA device")
    record = bench.cells(anew=True)
    path_parts(record, scratch(directory), rounds)
