"""Measure the rates behind the chooser, on the table that is being gathered from.

Rates depend on the size of the table (see [Note: Translation] in model), so they are
measured on the first table of a size class, in under a second, and cached on disk for
this device, driver, size class and number of threads.
"""

import dataclasses
import hashlib
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path as FilePath
from typing import Any

import torch

from pydirect.gather.engine import Engine
from pydirect.gather.model import Rates, Workload, touched_pages
from pydirect.gather.request import Path, Request
from pydirect.kernels.nvrtc import cache_directory, write_atomically
from pydirect.memory import empty_pinned, reach

_VERSION = 5
_SMALLEST_BYTES = 64 << 20
_LINE_BYTES = 128
_LONG_BYTES = 4096
# Of GPU memory, while measuring: a first gather must not be what runs out of it.
_OUT_BYTES = 32 << 20
_NUM_LINES = _OUT_BYTES // _LINE_BYTES
_COPIES = 2
_BURSTS = 6
_CALLS = 3
_NUM_LONG = _OUT_BYTES // _LONG_BYTES
# A gather that takes so much longer than its bytes on the link has another limit.
_ABOVE_LINK = 1.2


def size_class(table_bytes: int) -> int:
    """Tables whose sizes round to the same power of two share their rates."""
    return max(0, round(math.log2(max(1, table_bytes) / _SMALLEST_BYTES)))


def load(engine: Engine, table: torch.Tensor) -> Rates | None:
    """The rates for ``table`` from the cache directory; None: not there."""
    try:
        text = _cache_file(engine.device, table).read_text()
        values = json.loads(text)
        values["page_ns"] = tuple(map(tuple, values["page_ns"]))
        return Rates(**values)
    except (OSError, KeyError, TypeError, ValueError):
        # Missing, from another version, or damaged: measure again.
        return None


def measure_and_store(engine: Engine, table: torch.Tensor) -> Rates:
    """Measure the rates for ``table`` (uint8, 2-D, pinned) and cache them."""
    rates = measure(engine, table)
    text = json.dumps(dataclasses.asdict(rates), indent=1)
    write_atomically(_cache_file(engine.device, table), text.encode())
    return rates


def _cache_file(device: torch.device, table: torch.Tensor) -> FilePath:
    properties = torch.cuda.get_device_properties(device)
    facts = {
        "version": _VERSION,
        "device": properties.name,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "reach": reach(table).value,
        "size_class": size_class(table.nbytes),
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return cache_directory() / f"rates-{digest[:24]}.json"


def measure(engine: Engine, table: torch.Tensor) -> Rates:
    """Measure all rates; takes 0.2 to 1 s, 32 MiB of the device, and waits for it."""
    flat = table.reshape(-1)
    if flat.numel() < _SMALLEST_BYTES:
        flat = empty_pinned((_SMALLEST_BYTES,), torch.uint8)
    lines, long_rows = _rows(flat, _LINE_BYTES), _rows(flat, _LONG_BYTES)

    def ms(rows: torch.Tensor, num: int, path: Path, distinct: float = 1.0) -> float:
        return _gather_ms(engine, rows, num, path, distinct)

    direct_ms = ms(lines, 64, Path.DIRECT)
    sorted_ms = ms(lines, 64, Path.SORTED)
    long_direct_ms = ms(long_rows, _NUM_LONG, Path.DIRECT) - direct_ms
    link_gbps = _OUT_BYTES / max(1e-3, long_direct_ms) / 1e6
    random_ns = (ms(lines, _NUM_LINES, Path.DIRECT) - direct_ms) * 1e6 / _NUM_LINES
    near_ms = ms(lines[:_NUM_LINES], _NUM_LINES, Path.SORTED) - sorted_ms
    sort_ns = max(0.0, near_ms * 1e6 - _OUT_BYTES / link_gbps) / _NUM_LINES
    repeats_ms = ms(lines[: _NUM_LINES // 4], _NUM_LINES, Path.SORTED, 0.25)
    repeats_ns = (repeats_ms - sorted_ms) * 1e6 - _OUT_BYTES / 4 / link_gbps
    ordered_ms = {
        n: ms(lines, n, Path.SORTED) - sorted_ms
        for n in (_NUM_LINES // 16, _NUM_LINES // 4, _NUM_LINES)
    }
    return Rates(
        link_gbps=link_gbps,
        direct_ms=direct_ms,
        sorted_ms=sorted_ms,
        random_ns=max(0.0, random_ns),
        sort_ns=sort_ns,
        radix_ns=max(0.0, repeats_ns) / _NUM_LINES,
        page_ns=page_costs(
            ordered_ms,
            table_bytes=lines.nbytes,
            sort_ns=sort_ns,
            link_gbps=link_gbps,
        ),
        **_cpu_rates(engine, flat),
    )


def _cpu_rates(engine: Engine, flat: torch.Tensor) -> dict[str, float]:
    """The rates of the paths that the CPU takes part in."""
    lines, long_rows = _rows(flat, _LINE_BYTES), _rows(flat, _LONG_BYTES)

    def ms(rows: torch.Tensor, num: int) -> float:
        return _gather_ms(engine, rows, num, Path.CPU)

    # A few rows wake no thread, so what waking them costs is the rest of many.
    part, rest = _NUM_LINES // 8, _NUM_LINES - _NUM_LINES // 8
    sync_ms, part_ms, all_ms = (ms(lines, n) for n in (64, part, _NUM_LINES))
    line_ns = max(0.0, all_ms - part_ms) * 1e6 / rest
    cpu_ms = max(sync_ms, part_ms - part * line_ns / 1e6)
    # So few rows do not cost the `cpu_ms` that many short ones do: were it taken off,
    # a byte would seem half as long as it takes in gathers of gigabytes.
    long_ns = (ms(long_rows, _NUM_LONG) - sync_ms) * 1e6 / _NUM_LONG
    cpu_byte_ns = max(0.0, long_ns - line_ns) / (_LONG_BYTES - _LINE_BYTES)
    dma_gbps = _dma_gbps(engine.device, flat)
    run_ns = (_run_ms(engine, lines[:_NUM_LINES]) - sync_ms) * 1e6 / _NUM_LINES
    return {
        "dma_gbps": dma_gbps,
        "sync_ms": sync_ms,
        "cpu_ms": cpu_ms,
        "cpu_row_ns": max(0.0, line_ns - _LINE_BYTES * cpu_byte_ns),
        "cpu_byte_ns": cpu_byte_ns,
        "dma_call_us": _dma_call_us(engine.device, flat),
        "dma_index_ns": max(0.0, run_ns - _LINE_BYTES / dma_gbps),
    }


def page_costs(
    ordered_ms: dict[int, float], *, table_bytes: int, sort_ns: float, link_gbps: float
) -> tuple[tuple[int, float], ...]:
    """Nanoseconds for each touched page, by number of rows.

    Where the link was the limit, a gather tells nothing of translations: such numbers
    are left out, except for the least, whose cost is then the most it can be.

    Args:
        ordered_ms: milliseconds of sorted gathers of lines by their number of rows,
            launch costs taken off.
        table_bytes: size of the table the rows were drawn from.
        sort_ns: cost of ordering, an index.
        link_gbps: zero-copy reads of long rows, GB/s.
    """
    found: list[tuple[int, float]] = []
    for n, took in sorted(ordered_ms.items()):
        work = Workload(num_indices=n, row_bytes=_LINE_BYTES, table_bytes=table_bytes)
        spent_ns = max(0.0, took * 1e6 - n * sort_ns)
        if not found or spent_ns > _ABOVE_LINK * n * _LINE_BYTES / link_gbps:
            found.append((n, spent_ns / touched_pages(n, work)))
    return tuple(found)


def _rows(flat: torch.Tensor, row_bytes: int) -> torch.Tensor:
    num = flat.numel() // row_bytes
    return flat[: num * row_bytes].view(num, row_bytes)


def _gather_ms(
    engine: Engine, rows: torch.Tensor, num: int, path: Path, distinct: float = 1.0
) -> float:
    out = torch.empty(num, rows.shape[1], dtype=torch.uint8, device=engine.device)

    def once() -> Callable[[], Any]:
        index = torch.randint(0, rows.shape[0], (num,), device=engine.device)
        request = Request(table=rows, index=index, out=out)
        return lambda: engine.gather(request, path, distinct_share=distinct)

    return _median_ms(engine.device, once)


def _run_ms(engine: Engine, rows: torch.Tensor) -> float:
    """One run over all of ``rows``: what looking for runs costs."""
    index = torch.arange(rows.shape[0], device=engine.device)
    out = torch.empty(rows.shape, dtype=torch.uint8, device=engine.device)
    request = Request(table=rows, index=index, out=out)
    return _median_ms(engine.device, lambda: lambda: engine.gather(request, Path.DMA))


def _median_ms(device: torch.device, prepare: Callable[[], Callable[[], Any]]) -> float:
    """Wall-clock milliseconds of what ``prepare`` returns, device included, in bursts
    of a few as training makes them; the first burst warms up."""
    times = []
    for _ in range(_BURSTS):
        works = [prepare() for _ in range(_CALLS)]
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        for work in works:
            work()
        torch.cuda.synchronize(device)
        times.append((time.perf_counter() - began) * 1e3 / _CALLS)
    return statistics.median(times[1:])


def _dma_gbps(device: torch.device, flat: torch.Tensor) -> float:
    target = torch.empty(_OUT_BYTES, dtype=torch.uint8, device=device)

    def copies() -> None:
        for _ in range(_COPIES):
            target.copy_(flat[:_OUT_BYTES], non_blocking=True)

    return _COPIES * _OUT_BYTES / _median_ms(device, lambda: copies) / 1e6


def _dma_call_us(device: torch.device, flat: torch.Tensor) -> float:
    target = torch.empty(_LONG_BYTES, dtype=torch.uint8, device=device)

    def calls() -> None:
        for _ in range(100):
            target.copy_(flat[:_LONG_BYTES], non_blocking=True)

    return _median_ms(device, lambda: calls) * 1e3 / 100
