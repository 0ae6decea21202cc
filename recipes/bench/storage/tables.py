"""The tables of the storage benchmarks, from their results."""

from recipes.bench.common.results import Data
from recipes.bench.common.text import markdown, where


def io(data: Data) -> str:
    """Our SSD path against a raw O_DIRECT loop of the same block and depth."""
    rows = [
        [
            f"{cell['what']}, {cell['block_mib']} MiB, depth {cell['depth']}",
            f"{cell['raw_write_gb_per_s']:.2f}",
            f"{cell['write_ratio']:.3f}",
            f"{cell['raw_read_gb_per_s']:.2f}",
            f"{cell['read_ratio']:.3f}",
        ]
        for cell in data["cells"].values()
        if "write_ratio" in cell
    ]
    head = ["", "raw write GB/s", "ours / raw", "raw read GB/s", "ours / raw"]
    text = (
        "**SSD path** against a raw `O_DIRECT` loop of the same block size and depth, "
        "in alternate rounds of one run, with matrix products on the GPU meanwhile."
    )
    return f"{text}\n\n{markdown(head, rows)}\n\n{where(data)}"


def gds(data: Data) -> str:
    """GPU to SSD by every path, and the automatic choice."""
    rows, notes = [], []
    paths = {
        cell["path"]: cell for cell in data["cells"].values() if cell["what"] == "path"
    }
    for cell in data["cells"].values():
        if cell["what"] == "path" and "error" in cell:
            notes.append(f"{cell['path']}: {cell['error'].splitlines()[0]}")
        elif cell["what"] == "path":
            rates = (f"{cell[k + '_gb_per_s']:.2f}" for k in ("write", "read"))
            ratios = (f"{cell[k + '_ratio']:.3f}" for k in ("write", "read"))
            write, read = zip(rates, ratios, strict=True)
            rows.append([cell["path"], *write, *read])
        elif cell["what"] == "automatic choice":
            notes.append(_chosen(cell, paths.get(cell["path"], {})))
    head = ["", "write GB/s", "/ raw", "read GB/s", "/ raw"]
    text = (
        "**GPU memory to SSD**, 64 MiB records, depth 4, in alternate rounds with the "
        "raw `O_DIRECT` loop; `/ raw` is the median of the rounds' ratios. The two "
        "directories of the stripe lie on one disk: what striping costs, and no gain."
    )
    listed = "\n".join(f"- {line}" for line in notes)
    return f"{text}\n\n{markdown(head, rows)}\n\n{listed}\n\n{where(data)}"


def _chosen(cell: Data, path: Data) -> str:
    """The automatic choice against its two targets."""
    text = f"Chosen: {cell['path']}, {cell['of_best']:.3f} of the best round trip"
    if "write_ratio" not in path:
        return text
    write, read = path["write_ratio"], path["read_ratio"]
    met = cell["of_best"] >= 0.97 and min(write, read) >= 0.95
    return (
        f"{text} (target 0.97), {write:.3f} of raw written and {read:.3f} read (target "
        f"0.95): {'met' if met else 'NOT met'}"
    )


def malloc_hook(data: Data) -> str:
    """What the hook saw of PyTorch's allocators, and what it cost."""
    rows = [
        [
            cell["allocator"] + _registering(cell["counters"]),
            str(cell["segments"] or "-"),
            _unseen(cell["coverage"]),
            str(cell["counters"]["registered"]),
            str(cell["calls_in_timed_steps"]),
            f"{cell['step_ratio']:.4f}x" if "step_ratio" in cell else "not timed",
            f"{cell['ratio_without_hook']:.4f}x"
            if "ratio_without_hook" in cell
            else "-",
            "yes" if cell["losses_equal"] else "NO",
        ]
        for cell in data["cells"].values()
        if "error" not in cell and "counters" in cell
    ]
    failed = [
        f"- {cell['allocator']}: {cell['error'].splitlines()[0]}"
        for cell in data["cells"].values()
        if "error" in cell
    ]
    head = ["allocator", "segments", "not seen", "registered", "calls in timed steps"]
    ratios = ["step with / without", "without / without", "losses equal"]
    table = markdown([*head, *ratios], rows)
    text = (
        "**The malloc hook** under PyTorch's allocators, in training processes that "
        "take turns; *without / without* is what two processes that lack the hook "
        "differ by. Expandable segments come from `cuMemCreate`, which no preloaded "
        "library sees: they are counted. What `cudaMallocAsync` gives is registered "
        "only with `SSDTRAIN_HOOK_ASYNC=1`"
    )
    counted = any(
        c.get("counters", {}).get("unregistered_async") for c in data["cells"].values()
    )
    text += "." if counted else "; without it, that allocator was not timed."
    parts = (text, table, "\n".join(failed), where(data))
    return "\n\n".join(part for part in parts if part)


def _registering(counters: Data) -> str:
    """What an allocator's calls were timed with, if it is not the default."""
    asked = counters["malloc_async_calls"]
    return ", registered" if asked and counters["registered"] == asked else ""


def _unseen(coverage: Data | None) -> str:
    """Segments that the hook does not know, and why."""
    if coverage is None:
        return "-"
    reasons = [
        f"{coverage[f'num_{why}']} {why}"
        for why in ("expandable", "small", "unexplained")
        if coverage[f"num_{why}"]
    ]
    return ", ".join(reasons) or "none"


def soak(data: Data) -> str:
    """What must not grow while hundreds of gigabytes go to the SSD and back."""
    cells = list(data["cells"].values())
    rows = [
        [
            f"{cell['written_gb']:.0f}",
            f"{cell['file_bytes'] / 1e9:.2f}",
            str(cell["resident_mib"]),
            f"{cell['descriptors']}, {cell['threads']}",
            *(
                f"{cell[f'{way}_p50_ms']:.0f}, {cell[f'{way}_p99_ms']:.0f}"
                for way in ("write", "read")
            ),
        ]
        for cell in cells
    ]
    head = ["GB written", "file GB", "resident MiB", "descriptors, threads"]
    table = markdown([*head, "write ms p50, p99", "read ms p50, p99"], rows)
    text = (
        "**Soak of the SSD target**: steps of 48 records of mixed sizes, every byte "
        "compared; latencies of 16 MiB. The kernel counted "
        f"{data['kernel_write_gb']:.1f} GB written."
    )
    return f"{text}\n\n{table}\n\n{where(data)}"
