"""Every file that is read, damaged in ten thousand ways: one clear error, or it loads.

A clear error is a ValueError of ours that names the file (`ConfigError` and the like;
never json's, yaml's or Unicode's own), raised while the file is read. What loads is
used: a plan trains a step whose gradients are compared byte for byte, a profile is
planned from, a dataset becomes a graph. A block of files runs in a process of its own
with a time limit, and is written down when it ends, so a rerun goes on.

    OMP_NUM_THREADS=1 python -m recipes.bench safety.damaged_files --files 10000
"""

import logging
import random
import resource
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

from recipes.bench.harness.cli import Bench
from recipes.bench.harness.processes import guarded
from recipes.bench.safety.blocks import Sums, judge, run_campaign
from recipes.bench.safety.damage import damaged
from recipes.bench.safety.readers import READERS, Reader

PACKAGES = ("ssdtrain", "hector", "pydirect")
BLOCK = 50
LIMIT_S = 120
"""Of a block: a file that hangs its reader is bad."""
MOST_MEMORY_BYTES = 16 << 30
"""Of a block's address space: a damaged length must not become an allocation."""


def verdict(reader: Reader, seed: int, directory: Path) -> str | None:
    """Damage a file and read it; what was wrong, or None.

    Args:
        directory: empty; what is made in it stays.
    """
    draw = random.Random(f"{reader.name} {seed}")
    path = reader.make(directory)
    kind, content = damaged(path, draw)
    path.write_bytes(content)
    try:
        reader.read(path)
    except ValueError as error:
        own = type(error).__module__.split(".")[0] in PACKAGES
        said = any(name in str(error) for name in (path.name, *reader.parts))
        if (own or type(error) is ValueError) and said:
            return None
        return f"{kind}: {type(error).__name__}: {error}"[:300]
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        return f"{kind}: {type(error).__name__} at {where}: {error}"[:300]
    return None


def run_block(reader: Reader, first: int, number: int) -> list[dict[str, Any]]:
    """Seeds and verdicts of the bad files among `number`."""
    warnings.simplefilter("ignore")
    bad = []
    for seed in range(first, first + number):
        with tempfile.TemporaryDirectory() as directory:
            what = verdict(reader, seed, Path(directory))
        if what is not None:
            bad.append({"reader": reader.name, "seed": seed, "what": what})
    return bad


def _limited(reader: Reader, first: int, number: int) -> list[dict[str, Any]]:
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY_BYTES, MOST_MEMORY_BYTES))
    logging.disable(logging.WARNING)
    return run_block(reader, first, number)


def run_guarded(reader: Reader, first: int, number: int) -> list[dict[str, Any]]:
    """`run_block` in a process of its own; its death or delay is a bad file too."""
    block = reader, first, number
    bad, what = guarded(_limited, *block, limit_s=LIMIT_S, method="fork")
    if not what:
        return list(bad)
    if number > 1:  # which of them?
        return [
            bad
            for seed in range(first, first + number)
            for bad in run_guarded(reader, seed, 1)
        ]
    return [{"reader": reader.name, "seed": first, "what": what}]


def main(bench: Bench, *, files: int = 10_000, kind: str | None = None) -> None:
    """Blocks of all readers in turns, until the files are done or the time is over.

    Args:
        kind: of file, this one alone
    """
    readers = [reader for reader in READERS if kind in (None, reader.name)]

    def block(number: int) -> Sums:
        turn, at = divmod(number, len(readers))
        bad = run_guarded(readers[at], turn * BLOCK, BLOCK)
        return {"files": {readers[at].name: BLOCK}, "total": BLOCK, "bad": bad}

    cells, wrong = bench.cells({"block": BLOCK}), ("bad",)
    sums = run_campaign(cells, block, files, counted="total", wrong=wrong)
    judge(sums, bench.out, wrong)
