"""`gnn.json` as a page's section: Figure 4.8 on this machine.

python -m recipes.bench.gnn.tables [folder of gnn.json]
"""

import sys
from pathlib import Path
from typing import Any

from recipes.bench.common.cells import RESULTS
from recipes.bench.common.results import find
from recipes.bench.common.text import markdown, where

LEAST_CUT, LEAST_SPEEDUP = 0.47, 1.6
SIDES = {"pyg": "PyG's way", "pydirect": "pydirect"}

Cell = dict[str, Any]


def gnn(results_dir: Path | str) -> str:
    """The page's section; empty where `gnn.json` is not in ``results_dir``."""
    data = find(Path(results_dir) / "gnn.json")
    if data is None:
        return ""
    cases = whole_cases(data["cells"])
    if not cases:
        return ""
    settings = data["settings"]
    parts = [
        "**GNN training** (Figure 4.8), features in host memory, graphs with the "
        "statistics of ogbn-products, batches of "
        f"{settings['batch_size']} seeds, fan-outs 15 and 10, hidden 256; both sides "
        "with the same sampler, model and seeds. *Copy*, *train* and *other* "
        "(sampling) one after the other, milliseconds a batch; *epoch* as it is run: "
        "PyG's way samples in the background, and in brackets it also gets our "
        "pipeline; idle GPU and busy CPU over that run.",
        table(cases),
        "\n".join(f"- {line}" for line in verdicts(data["cells"], cases)),
        data.get("note", ""),
        where(data),
    ]
    return "\n\n".join(part for part in parts if part)


def tiering(results_dir: Path | str) -> str:
    """Epochs with hot rows in GPU memory; empty where none is recorded."""
    parts = []
    for path in sorted(Path(results_dir).glob("tiering*.json")):
        data = find(path)
        if data is not None:
            parts += [_tiers(data["cells"]), where(data)]
    if not parts:
        return ""
    head = (
        "**Tiering.** GraphSAGE, fan-outs 12, 12, 12, batches of 1024 seeds a GPU, 6M "
        "nodes and 90M edges, features in pinned host memory; *share*: of the rows "
        "that each GPU holds, the hottest by weighted reverse PageRank. Several GPUs "
        "hold different rows and read one another's in place. Stages alone, in seconds "
        "an epoch; *untiered*: times the epoch of as many GPUs without; *one GPU*: "
        "times the epoch of one GPU with the same share."
    )
    return "\n\n".join([head, *parts])


def _tiers(cells: dict[str, Cell]) -> str:
    rows = []
    epochs = {name: cell for name, cell in cells.items() if "epoch_s" in cell}
    for name, cell in epochs.items():
        case, gpus, share = name.split("/")
        plain = epochs.get(f"{case}/{gpus}/0.0")
        alone = epochs.get(f"{case}/1 GPU/{share}") if gpus != "1 GPU" else None
        rows.append(
            [
                case,
                gpus,
                f"{float(share):.0%}",
                f"{cell['hit_rate']:.2f}" if "hit_rate" in cell else "-",
                f"{cell['drawing_alone_s']:.2f} / {cell['copying_alone_s']:.2f} / "
                f"{cell['training_alone_s']:.2f}",
                f"{cell['epoch_s']:.3f}",
                f"{plain['epoch_s'] / cell['epoch_s']:.2f}x" if plain else "-",
                f"{alone['epoch_s'] / cell['epoch_s']:.2f}x" if alone else "-",
            ]
        )
    best = next((c for name, c in cells.items() if name.startswith("hit rates")), {})
    shares = [key.split()[1] for key in best if key.startswith("best ")]
    scored = "weighted_reverse_pagerank"
    told = ", ".join(
        f"{float(share):.0%} of the rows {best[f'{scored} {share}']:.2f} of "
        f"{best[f'best {share}']:.2f}"
        for share in shares
    )
    columns = ["rows", "GPUs", "share", "hits", "drawing / copying / training"]
    table = markdown([*columns, "epoch s", "untiered", "one GPU"], rows)
    return table + (f"\n\nHit rates, of the best there are: {told}." if told else "")


def whole_cases(cells: dict[str, Cell]) -> dict[str, dict[str, Cell]]:
    """Cases both of whose sides ran, by name: their sides."""
    names = dict.fromkeys(name.rsplit("/", 1)[0] for name in cells if "/" in name)
    found = {}
    for name in names:
        sides = {
            key: cells[f"{name}/{key}"]
            for key in (*SIDES, "pyg_overlapped")
            if "run" in cells.get(f"{name}/{key}", {})
        }
        if all(key in sides for key in SIDES):
            found[name] = sides
    return found


def table(cases: dict[str, dict[str, Cell]]) -> str:
    """Two rows a case."""
    head = [
        "case", "features", "", "copy", "train", "other", "epoch s", "idle GPU",
        "CPU", "GPU peak",
    ]  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|--|--:|--|" + "--:|" * (len(head) - 3)]
    for name, sides in cases.items():
        case = sides["pyg"]["case"]
        for key, label in SIDES.items():
            side = sides[key]
            row = [
                f"{name}, {case['model']}",
                f"{case['num_features']}, {side['feature_gib']:.1f} GiB",
                label,
                *(f"{part_ms(side, part):.1f}" for part in ("copy", "train", "other")),
                epoch(sides, key),
                percent(side["run"]["gpu_idle_share"]),
                f"{side['run']['cpu_percent']:.0f} %",
                f"{side['peak_gib']:.2f} GiB",
            ]
            if key != "pyg":
                row[0] = row[1] = ""
            lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def part_ms(side: Cell, part: str) -> float:
    """One part of a bar, a batch."""
    return 1e3 * float(side["bars"][f"{part}_s"]) / side["bars"]["batches"]


def epoch_s(side: Cell) -> float:
    """An epoch at the pace of the run."""
    run = side["run"]
    return float(run["wall_s"] / max(1, run["batches"]) * side["batches_an_epoch"])


def epoch(sides: dict[str, Cell], key: str) -> str:
    """Seconds; PyG's way with our pipeline in brackets."""
    text = f"{epoch_s(sides[key]):.2f}"
    if key == "pyg" and "pyg_overlapped" in sides:
        text += f" ({epoch_s(sides['pyg_overlapped']):.2f})"
    return text


def percent(share: float | None) -> str:
    """A share, or a dash without a GPU."""
    return "-" if share is None else f"{share:.0%}"


def verdicts(cells: dict[str, Cell], cases: dict[str, dict[str, Cell]]) -> list[str]:
    """One sentence a target."""
    cuts = {
        name: 1 - part_ms(sides["pydirect"], "copy") / part_ms(sides["pyg"], "copy")
        for name, sides in cases.items()
    }
    least = min(cuts, key=lambda name: cuts[name])
    met = sum(cut >= LEAST_CUT for cut in cuts.values())
    lines = [
        f"Copy time cut by {min(cuts.values()):.0%} ({least}) to "
        f"{max(cuts.values()):.0%}; by at least {LEAST_CUT:.0%} in {met} of "
        f"{len(cuts)} cases."
    ]
    speedups = [
        f"{name} {epoch_s(sides['pyg']) / epoch_s(sides['pydirect']):.2f}x"
        + over_overlapped(sides)
        for name, sides in cases.items()
    ]
    lines.append(
        f"Epochs over PyG's way (target {LEAST_SPEEDUP}x where features bound "
        f"GraphSAGE; in brackets over PyG's way in our pipeline): "
        f"{', '.join(speedups)}."
    )
    worst = max(loss_difference(sides) for sides in cases.values())
    lines.append(f"Losses of both sides differ by {worst:.1e} at most (relative).")
    listing = cells.get("listing 4.2", {})
    if "listing_4_2" in listing:
        lines.append(listing_line(listing))
    return lines


def over_overlapped(sides: dict[str, Cell]) -> str:
    if "pyg_overlapped" not in sides:
        return ""
    ratio = epoch_s(sides["pyg_overlapped"]) / epoch_s(sides["pydirect"])
    return f" ({ratio:.2f}x)"


def loss_difference(sides: dict[str, Cell]) -> float:
    """The largest relative difference of the first losses."""
    pairs = zip(
        sides["pydirect"]["bars"]["first_losses"],
        sides["pyg"]["bars"]["first_losses"],
        strict=True,
    )
    return float(max(abs(a - b) / abs(b) for a, b in pairs))


def listing_line(listing: Cell) -> str:
    """The two-line change on a plain script."""
    stock, changed = listing["listing_4_1"], listing["listing_4_2"]
    parts = [
        "The two changed lines of Listing 4.2 on a plain loop: "
        f"{stock['seconds'] / changed['seconds']:.2f}x, losses within "
        f"{changed['largest_loss_difference']:.1e}"
    ]
    if "listing_4_1_again" in listing:
        again = listing["listing_4_1_again"]["largest_loss_difference"]
        parts.append(
            f" (the unchanged script, run twice: {again:.1e}), accuracy "
            f"{stock['accuracy']:.4f} and {changed['accuracy']:.4f}"
        )
    parts.append(
        f"; GPU peak {changed['peak_gib']:.2f} GiB beside "
        f"{listing['feature_gib']:.2f} GiB of features, {listing['gathers']} gathers."
    )
    return "".join(parts)


def main() -> None:
    """The section, and what failed."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS / "gnn"
    print(gnn(folder) or f"no whole case in {folder}/gnn.json")
    data = find(folder / "gnn.json")
    for name, cell in data["cells"].items() if data else ():
        if "error" in cell:
            print(name, cell["error"])


if __name__ == "__main__":
    main()
