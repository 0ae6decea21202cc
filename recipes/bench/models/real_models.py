"""Stock transformers models as people train them, under every way to save memory.

Qwen3 1.7B, 4B, 8B and Mistral 7B shapes from their configurations and a mixture of
experts (12 layers of 2048, 32 experts, 8 a token), random weights, bf16, sdpa, Liger's
fused linear cross-entropy (and nothing else of Liger) for every column, fused AdamW,
full or LoRA. `gc` is transformers' non-reentrant gradient checkpointing; `gc + trl`
moves its inputs by TRL's OffloadActivations. Each row is a process of its own under a
limit; a rerun goes on. `peak` is the most that forward and backward need above the
level before the step, gradients allocated. With `--share` all GPUs are at work, a model
and way to run it on each; every row has its share of the cores.

    python -m recipes.bench.models.real_models --list
    python -m recipes.bench.models.real_models --only 'qwen3-4b/full/8k/eager/*'
    python -m recipes.bench.models.real_models --rows qwen3-4b:24/full/8k/eager/gc
    python -m recipes.bench.models.real_models --only '*/512/*'    # the host's time
    python -m recipes.bench.models.real_models --only '*limit=*' '*/gc'  # does it fit?
"""

import argparse
import contextlib
import math
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from recipes.bench.common.cells import RESULTS, Cells
from recipes.bench.common.gpus import Gpus, visible_gpus
from recipes.bench.models.real_catalogue import (
    HOST_TOKENS,
    RELATIVE,
    Row,
    catalogue,
    relative_of,
    row_of,
)
from recipes.bench.models.real_row import Run, measure

PRELOAD = [
    "torch",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.models.mistral.modeling_mistral",
    "recipes.bench.models.real_row",
]
"""Imported once, in the process that every row is forked from. None is ssdtrain, and
none may touch CUDA (Liger does), which does not survive a fork."""
POISONED = "CUDA was initialized before the fork"


@dataclass(frozen=True)
class Part:
    """What of the host a row has to itself."""

    gpus: tuple[str, ...] = ()
    """As `CUDA_VISIBLE_DEVICES` names them; none: all that there are."""
    cores: tuple[int, ...] = ()
    """None: all that this process may use."""


def parts_of(gpus: Sequence[str], cores: Sequence[int]) -> dict[str, Part]:
    """One GPU and as many neighbouring cores for each of them, by GPU."""
    share = max(1, len(cores) // len(gpus))
    return {
        gpu: Part((gpu,), tuple(cores[at * share : (at + 1) * share]))
        for at, gpu in enumerate(gpus)
    }


ALL = Part()


def in_process(row: Row, run: Run, limit_s: float, part: Part = ALL) -> dict[str, Any]:
    """Measure a row in fresh processes, one a rank.

    Raises:
        TimeoutError: it took longer. RuntimeError: a process ended without an answer.
    """
    # Asked through NVML, whether there is a GPU does not initialize CUDA.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    until = time.monotonic() + limit_s
    found = _started("forkserver", row, run, until, part)
    if found.get("error") == POISONED:
        print(f"{POISONED}: the row starts from nothing", flush=True)
        found = _started("spawn", row, run, until, part)
    return found


def _started(
    method: str, row: Row, run: Run, until: float, part: Part
) -> dict[str, Any]:
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(PRELOAD)
    num_ranks = row.mode.num_ranks
    shared = {
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        # One host: no name has to be looked up.
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    if part.gpus:
        shared["CUDA_VISIBLE_DEVICES"] = ",".join(part.gpus)
    ends, processes = [], []
    for rank in range(num_ranks):
        here, there = context.Pipe(duplex=False)
        own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = context.Process(target=_rank, args=(row, run, own, part, there))
        process.start()
        there.close()
        ends.append(here)
        processes.append(process)
    try:
        return _answer(row, ends, until)
    finally:
        for process in processes:
            if row.mode.has_mesh or process.exitcode is None:
                process.join(2)
            if process.is_alive():
                process.kill()
            process.join()


def _answer(row: Row, ends: list[Connection], until: float) -> dict[str, Any]:
    """What rank 0 says, once every rank has spoken or one has failed."""
    found: dict[str, Any] = {}
    waiting = list(ends)
    while waiting:
        ready = wait(waiting, max(until - time.monotonic(), 0))
        if not ready:
            raise TimeoutError(f"{row.name} took too long")
        for end in ready:
            assert isinstance(end, Connection)
            waiting.remove(end)
            try:
                said = end.recv()
            except EOFError:
                raise RuntimeError(f"{row.name}: a process ended early") from None
            if "error" in said:
                return dict(said)
            if end is ends[0]:
                found = said
    return found


def _rank(
    row: Row,
    run: Run,
    environment: dict[str, str],
    part: Part,
    answer: Connection,
) -> None:
    """One rank of one row."""
    os.environ.update(environment)
    if part.cores:
        os.sched_setaffinity(0, part.cores)
    import torch

    try:
        poisoned = torch.cuda._is_in_bad_fork()
        found = {"error": POISONED} if poisoned else measure(row, run)
    except torch.OutOfMemoryError as error:
        found = {"error": f"out of memory: {error}"[:300]}
    except Exception as error:
        where = traceback.format_exc().splitlines()[-8:]
        text = f"{type(error).__name__}: {error}"[:500]
        found = {"error": text, "traceback": where}
    answer.send(found)
    answer.close()
    if row.mode.has_mesh and torch.distributed.is_initialized():
        with contextlib.suppress(Exception):
            # Rank 0 holds the store that the others' watchdogs ask.
            if "error" not in found:
                torch.distributed.barrier()
            torch.distributed.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def given_bytes(row: Row, cells: dict[str, Any]) -> dict[str, int]:
    """The relative settings of a row in bytes, by field of `Run`.

    Raises:
        LookupError: the row that one is relative to has no figure; says which.
    """
    given: dict[str, int] = {}
    for name, (times, column) in relative_of(row.column).items():
        other = cells.get(f"{row.cell}/{column}", {})
        if RELATIVE[name] not in other:
            raise LookupError(f"{row.name} needs the row {row.cell}/{column}")
        given[f"{name}_bytes"] = int(times * other[RELATIVE[name]] * 1e9)
    return given


def started(
    row: Row, run: Run, given: dict[str, int], limit_s: float, part: Part = ALL
) -> dict[str, Any]:
    """Measure a row under what it was given."""
    return {**given, **in_process(row, replace(run, **given), limit_s, part)}


def over_baseline(cells: dict[str, Any]) -> None:
    """Add what a row costs and saves over `keep` of its cell, where that was run: by
    the middle of its steps, or by all of them where their lengths differ. One step of a
    few that was disturbed is no reason to call all others fast."""
    for name, cell in cells.items():
        row = row_of(name)
        plain = cells.get(row.baseline, {})
        if "step_ms" not in cell or "step_ms" not in plain:
            continue
        cell["step_ratio"] = cell["step_ms"] / plain["step_ms"]
        if len(set(cell.get("tokens", ()))) > 1:
            cell["step_ratio"] = plain["tokens_per_s"] / cell["tokens_per_s"]
        if plain["peak_gb"]:
            cell["peak_gone"] = 1 - cell["peak_gb"] / plain["peak_gb"]
        if "host_ms" not in cell or "host_ms" not in plain:
            continue
        cell["host_ratio"] = cell["host_ms"] / plain["host_ms"]
        if row.is_ours and "num_saved" in plain:
            excess_us = (cell["host_ms"] - plain["host_ms"]) * 1e3
            cell["host_us_per_saved"] = excess_us / sum(plain["num_saved"].values())


def table(cells: dict[str, Any]) -> str:
    """A line a row."""
    head = f"{'row':64} {'ms':>8} {'ratio':>6} {'peak':>6} {'pred ms':>8} {'GB':>5}"
    lines = [f"{head} {'all':>5} {'host':>6} {'us':>6}"]
    for name, cell in cells.items():
        if "step_ms" not in cell:
            lines.append(f"{name:64} {cell.get('error', '?')[:60]}")
            continue
        lines.append(
            f"{name:64} {cell['step_ms']:8.1f} {cell.get('step_ratio', 0):6.3f} "
            f"{cell['peak_gb']:6.2f} {cell.get('predicted_ms', 0):8.1f} "
            f"{cell.get('predicted_gb', 0):5.1f} {cell['reserved_gb']:5.1f} "
            f"{cell.get('host_ms', 0):6.1f} {cell.get('host_us_per_saved', 0):6.1f}"
        )
    return "\n".join(lines)


def chosen(options: argparse.Namespace) -> list[Row]:
    """The rows that the command line names.

    Raises:
        ValueError: a row that cannot be.
    """
    rows = [row_of(name) for name in options.rows]
    if options.only or not rows:
        wanted = options.only or ["*"]
        rows += [
            row
            for row in catalogue()
            if any(fnmatchcase(row.name, pattern) for pattern in wanted)
        ]
    return rows


def by_cell(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows that are relative to one another, in their order; those of most ranks first,
    as they wait for several GPUs."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.cell, []).append(row)
    return sorted(groups.values(), key=lambda group: -group[0].mode.num_ranks)


def run_rows(
    rows: Sequence[Row], run: Run, limit_s: float, cells: Cells, part: Part = ALL
) -> None:
    """Run those that are missing, one after another."""
    for row in rows:
        try:
            given = given_bytes(row, cells.data["cells"])
        except LookupError as missing:
            print(missing, flush=True)
            continue
        most_s = min(limit_s, cells.left_s())
        cells.run(row.name, partial(started, row, run, given, most_s, part))
        cells.revise(over_baseline)


def run_shared(
    rows: Sequence[Row], run: Run, limit_s: float, cells: Cells, gpus: Sequence[str]
) -> None:
    """Run those that are missing, on all GPUs of the host.

    Raises:
        ValueError: a row has more ranks than there are GPUs.
    """
    parts = parts_of(gpus, sorted(os.sched_getaffinity(0)))
    shared = Gpus(gpus)

    def one(group: list[Row]) -> None:
        with shared.lent(group[0].mode.num_ranks) as taken:
            cores = [core for gpu in taken for core in parts[gpu].cores]
            run_rows(group, run, limit_s, cells, Part(tuple(taken), tuple(cores)))

    with ThreadPoolExecutor(len(gpus)) as pool:
        list(pool.map(one, by_cell(rows)))


def main(argv: list[str] | None = None) -> int:
    """Run the rows that are missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--list", action="store_true", help="name the rows, run none")
    parser.add_argument("--only", nargs="+", default=[], help="patterns of row names")
    parser.add_argument("--rows", nargs="+", default=[], help="rows by name, any")
    parser.add_argument("--seconds", type=float, default=600, help="for all rows")
    parser.add_argument("--limit-s", type=float, default=90, help="for one row")
    parser.add_argument("--steps", type=int, default=5, help="timed ones of a row")
    parser.add_argument("--host-steps", type=int, default=5, help="0: no host times")
    told = "then steps are timed, settled or not"
    parser.add_argument("--warm-up-s", type=float, default=math.inf, help=told)
    told = "rows of several models at a time, on all GPUs"
    parser.add_argument("--share", action="store_true", help=told)
    told = "ask the device's profiler how much of a forward it waits"
    parser.add_argument("--profiles", action="store_true", help=told)
    told = "folder for the profiles and plans of ours (`ssdtrain plan --profile`)"
    parser.add_argument("--save", type=Path, help=told)
    parser.add_argument("--lengths", type=Path, help="documents of the rows `text`")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "models" / "real_models.json"
    )
    options = parser.parse_args(argv)
    try:
        rows = chosen(options)
    except ValueError as error:
        parser.error(str(error))
    if options.list:
        print(*(row.name for row in rows), sep="\n")
        return 0
    run = Run(
        *(options.steps, options.host_steps, options.lengths, options.device),
        warm_up_s=options.warm_up_s,
        profiles=options.profiles,
        save=options.save,
    )
    settings = {"device": options.device, "host_tokens": HOST_TOKENS}
    cells = Cells(options.out, options.seconds, settings)
    if options.share:
        gpus = visible_gpus() if options.device == "cuda" else ["0", "1"]
        run_shared(rows, run, options.limit_s, cells, gpus)
    else:
        run_rows(rows, run, options.limit_s, cells)
    print(table(cells.data["cells"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
