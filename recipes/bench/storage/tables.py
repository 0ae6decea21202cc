"""The tables of the storage benchmarks."""

from recipes.bench.harness.records import Data
from recipes.bench.harness.tables import Column, paragraphs, table


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


def gds(data: Data) -> str:
    """GPU to SSD by every path, and the automatic choice."""
    cells = data["cells"].values()
    paths = {cell["path"]: cell for cell in cells if cell["what"] == "path"}
    notes = [
        f"- {name}: {cell['error'].splitlines()[0]}"
        for name, cell in paths.items()
        if "error" in cell
    ]
    notes += [
        _chosen(cell, paths.get(cell["path"], {}))
        for cell in cells
        if cell["what"] == "automatic choice"
    ]
    columns: dict[str, Column] = {
        "": "{path}",
        "write GB/s": "{write_gb_per_s:.2f}",
        "write / raw": "{write_ratio:.3f}",
        "read GB/s": "{read_gb_per_s:.2f}",
        "read / raw": "{read_ratio:.3f}",
    }
    good = [cell for cell in paths.values() if "error" not in cell]
    return paragraphs(table(good, columns), "\n".join(notes))


def _chosen(cell: Data, path: Data) -> str:
    """The automatic choice against its two targets."""
    text = f"- Chosen: {cell['path']}, {cell['of_best']:.3f} of the best round trip"
    if "write_ratio" not in path:
        return text
    write, read = path["write_ratio"], path["read_ratio"]
    met = cell["of_best"] >= 0.97 and min(write, read) >= 0.95
    return (
        f"{text} (target 0.97), {write:.3f} of raw written and {read:.3f} read (target "
        f"0.95): {'met' if met else 'NOT met'}"
    )


def soak(data: Data) -> str:
    """What must not grow while hundreds of gigabytes go to the SSD and back."""
    columns: dict[str, Column] = {
        "GB written": "{written_gb:.0f}",
        "file GB": lambda c: f"{c['file_bytes'] / 1e9:.2f}",
        "resident MiB": "{resident_mib}",
        "descriptors, threads": "{descriptors}, {threads}",
        "write ms p50, p99": "{write_p50_ms:.0f}, {write_p99_ms:.0f}",
        "read ms p50, p99": "{read_p50_ms:.0f}, {read_p99_ms:.0f}",
    }
    told = f"The kernel counted {data['kernel_write_gb']:.1f} GB written."
    return f"{told}\n\n{table(data['cells'], columns)}"
