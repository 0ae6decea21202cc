"""The README's measured tables, generated from `results/*.json`; never typed.

python -m recipes.bench.common.report          # print
python -m recipes.bench.common.report --write  # put them between the README's markers
python -m recipes.bench.common.report --check  # fail if the README is out of date
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from recipes.bench.common.cells import RESULTS, ROOT
from recipes.bench.common.text import Data, markdown, where
from recipes.bench.gather.tables import gather
from recipes.bench.gnn.tables import gnn
from recipes.bench.megatron.tables import megatron
from recipes.bench.models.tables import models, rivals
from recipes.bench.planner.tables import planner, rok
from recipes.bench.rgnn.tables import rgnn
from recipes.bench.safety.survival_tables import survival
from recipes.bench.safety.tables import sanitize, searches, verify

README = ROOT / "README.md"
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


def placement(data: Data) -> str:
    """Step ratio and activation peak of every way to place activations."""
    cells = data["cells"]
    sizes = list(dict.fromkeys(n.split("/")[0] for n in cells if "/" in n))
    columns = list(dict.fromkeys(n.split("/")[1] for n in cells if "/" in n))
    rows = []
    for column in columns:
        row = [column]
        for size in sizes:
            cell = cells.get(f"{size}/{column}", {})
            if "step_ratio" in cell:
                row.append(f"{cell['step_ratio']:.3f}x, {cell['peak_gb']:.2f} GB")
            else:
                row.append(cell.get("error", "-")[:40])
        rows.append(row)
    link = cells["link"]
    text = (
        "**Activation placement.** GPT blocks (hidden x layers), bf16, batch "
        f"{data['settings']['batch']}, sequence {data['settings']['sequence']}: step "
        "time over `keep`, and activation peak over forward and backward. `keep` is "
        "plain PyTorch; `trl` is TRL's OffloadActivations; every column ran in one "
        "process, and all losses were equal to the last bit: "
        f"{all(c['losses_equal'] for c in cells.values() if 'losses_equal' in c)}. "
        f"Link: {link['d2h_gb_per_s']:.1f} GB/s out, {link['h2d_gb_per_s']:.1f} in."
    )
    return f"{text}\n\n{markdown(['', *sizes], rows)}\n\n{where(data)}"


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
        for cell in data["cells"]
        if "write_ratio" in cell
    ]
    head = ["", "raw write GB/s", "ours / raw", "raw read GB/s", "ours / raw"]
    text = (
        "**SSD path** against a raw `O_DIRECT` loop of the same block size and depth, "
        "in alternate rounds of one run, with matrix products on the GPU meanwhile."
    )
    return f"{text}\n\n{markdown(head, rows)}\n\n{where(data)}"


def recipes(data: Data) -> str:
    """What recipes save and cost on GPT blocks, and their share of a model's bytes."""
    cells = data["cells"]
    rows = [
        [
            f"{size}, {name}",
            f"{cell[name]['step_ratio']:.4f}x",
            f"{cell[name]['peak_gb']:.2f}",
            f"{cell[name]['peak_gone']:.1%}",
            f"{cell[name]['share']:.1%}",
        ]
        for size, cell in cells.items()
        if "keep" in cell
        for name in ("recipes", "no limit")
    ]
    shares = [
        [name, f"{cell['share']:.1%}", "yes" if cell["bitwise_equal"] else "NO"]
        for name, cell in cells.items()
        if "bitwise_equal_offloading" in cell
    ]
    head = ["", "step / keep", "peak GB", "peak gone", "of saved bytes rebuilt"]
    text = (
        "**Recipes alone** (nothing offloaded). GPT blocks, hidden x layers @ batch x "
        "sequence, bf16: `recipes` holds to the default `max_overhead` of 1 %, `no "
        "limit` takes every recipe."
    )
    parts = [text, markdown(head, rows)]
    if shares:
        parts.append("The models of transformers, every recipe taken.")
        parts.append(markdown(["", "of saved bytes rebuilt", "bitwise equal"], shares))
    return "\n\n".join([*parts, where(data)])


def gds(data: Data) -> str:
    """GPU to SSD by every path, and the automatic choice."""
    rows, notes = [], []
    paths = {cell["path"]: cell for cell in data["cells"] if cell["what"] == "path"}
    for cell in data["cells"]:
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
        for cell in data["cells"]
        if "error" not in cell and "counters" in cell
    ]
    failed = [
        f"- {cell['allocator']}: {cell['error'].splitlines()[0]}"
        for cell in data["cells"]
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
        c.get("counters", {}).get("unregistered_async") for c in data["cells"]
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
    cells = data["cells"]
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


def host_time(data: Data) -> str:
    """What a session costs the host."""
    plain, size = data["cells"]["plain"], data["settings"]["size"]
    rows = [
        [
            name,
            f"{cell['host_ms']:.1f} ({cell['least_ms']:.1f})",
            f"{cell['us_per_saved']:.0f} ({cell['least_us']:.0f})",
        ]
        for name, cell in data["cells"].items()
        if "us_per_saved" in cell
    ]
    text = (
        "**Host time** until forward and backward are enqueued, GPT blocks "
        f"{size['hidden']}x{size['num_layers']}, batch {size['batch']}, "
        f"{plain['num_saved']} saved tensors: median and least of "
        f"{data['settings']['steps']} steps; plain PyTorch {plain['host_ms']:.1f} "
        f"({plain['least_ms']:.1f}) ms."
    )
    head = ["", "ms a step", "microseconds a saved tensor, over plain"]
    return f"{text}\n\n{markdown(head, rows)}\n\n{where(data)}"


def of_file(name: str, build: Callable[[Data], str]) -> Callable[[Path], str]:
    """A table from the record `name`; empty if nothing is recorded."""

    def table(results: Path) -> str:
        path = results / f"{name}.json"
        return build(json.loads(path.read_text())) if path.exists() else ""

    return table


TABLES: tuple[tuple[str, Callable[[Path], str]], ...] = (
    ("offload", of_file("placement", placement)),
    ("planner", planner),
    ("planner", rok),
    ("models", models),
    ("offload", rivals),
    ("megatron", megatron),
    ("offload", of_file("recipes", recipes)),
    ("storage", of_file("io", io)),
    ("storage", of_file("gds", gds)),
    ("storage", of_file("malloc_hook", malloc_hook)),
    ("storage", of_file("soak_cpu", soak)),
    ("safety", of_file("verify", verify)),
    ("offload", of_file("host_time", host_time)),
    ("safety", survival),
    ("safety", searches),
    ("safety", of_file("sanitize", sanitize)),
    ("gather", gather),
    ("gnn", gnn),
    ("rgnn", rgnn),
)
"""The folder of the results, and what builds a table from that folder."""


def render() -> str:
    """All tables whose results are recorded."""
    return "\n\n".join(
        text for area, table in TABLES if (text := table(RESULTS / area))
    )


def updated(readme: str) -> str:
    """The README with the tables between its markers."""
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{render()}\n{END}{after}"


def main() -> None:
    """Print, write or check."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.write:
        README.write_text(updated(README.read_text()))
    elif options.check:
        if updated(README.read_text()) != README.read_text():
            sys.exit(
                "README.md is out of date; run "
                "python -m recipes.bench.common.report --write"
            )
    else:
        print(render())


if __name__ == "__main__":
    main()
