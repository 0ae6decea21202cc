"""The tables of the storage benchmarks."""

from recipes.bench.harness.records import Data
from recipes.bench.harness.tables import Column, table


def io(data: Data) -> str:
    """Our SSD path against a raw O_DIRECT loop of the same block and depth."""
    columns: dict[str, Column] = {
        "": "{what}, {block_mib} MiB, depth {depth}",
        "raw write GB/s": "{raw_write_gb_per_s:.2f}",
        "write, ours / raw": "{write_ratio:.3f}",
        "raw read GB/s": "{raw_read_gb_per_s:.2f}",
        "read, ours / raw": "{read_ratio:.3f}",
    }
    return table(data["cells"], columns, needs="write_ratio")
