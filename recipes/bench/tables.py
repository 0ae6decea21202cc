"""The README's measured tables, generated from `results/*.json`; never typed.

python recipes/bench/tables.py          # print
python recipes/bench/tables.py --write  # put them between the README's markers
python recipes/bench/tables.py --check  # fail if the README is out of date
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
README = RESULTS.parents[2] / "README.md"
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


def where(data: dict[str, Any]) -> str:
    """Device, versions and command in one line."""
    env = data["environment"]
    versions = ", ".join(f"{k} {v}" for k, v in sorted(env["versions"].items()))
    return f"{env['device']}; {versions}; `{env['command']}`"


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """A table, numbers to the right."""
    lines = ["| " + " | ".join(head) + " |"]
    lines.append("|--|" + "--:|" * (len(head) - 1))
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def placement(data: dict[str, Any]) -> str:
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


def io(data: dict[str, Any]) -> str:
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


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {"placement": placement, "io": io}


def render() -> str:
    """All tables whose results are recorded."""
    parts = []
    for name, build in TABLES.items():
        path = RESULTS / f"{name}.json"
        if path.exists():
            parts.append(build(json.loads(path.read_text())))
    return "\n\n".join(parts)


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
            sys.exit("README.md is out of date; run recipes/bench/tables.py --write")
    else:
        print(render())


if __name__ == "__main__":
    main()
