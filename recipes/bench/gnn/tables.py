"""`gnn.json` as a page's section: Figure 4.8 on this machine; epochs with hot rows."""

from recipes.bench.harness.records import Data
from recipes.bench.harness.tables import Column, paragraphs, table, where

LEAST_CUT, LEAST_SPEEDUP = 0.47, 1.6
SIDES = {"pyg": "PyG's way", "pydirect": "pydirect"}

Cases = dict[str, dict[str, Data]]


def gnn(data: Data) -> str:
    """Two rows a case, and one sentence a target."""
    cases = whole_cases(data["cells"])
    if not cases:
        return ""
    rows = [
        {"name": name, "key": key, "label": label, "sides": sides, **sides[key]}
        for name, sides in cases.items()
        for key, label in SIDES.items()
    ]
    columns: dict[str, Column] = {
        "case": lambda r: "{name}, {case[model]}".format(**r) * (r["key"] == "pyg"),
        "features": lambda r: (
            "{case[num_features]}, {feature_gib:.1f} GiB".format(**r)
            * (r["key"] == "pyg")
        ),
        "": "{label}",
        "copy": lambda r: f"{part_ms(r, 'copy'):.1f}",
        "train": lambda r: f"{part_ms(r, 'train'):.1f}",
        "other": lambda r: f"{part_ms(r, 'other'):.1f}",
        "epoch s": _epoch,
        "idle GPU": "{run[gpu_idle_share]:.0%}",
        "CPU": "{run[cpu_percent]:.0f} %",
        "GPU peak": "{peak_gib:.2f} GiB",
    }
    lines = "\n".join(f"- {line}" for line in verdicts(data["cells"], cases))
    return paragraphs(table(rows, columns), lines, data.get("note", ""))


def whole_cases(cells: Data) -> Cases:
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


def part_ms(side: Data, part: str) -> float:
    """One part of a bar, a batch."""
    return 1e3 * float(side["bars"][f"{part}_s"]) / side["bars"]["batches"]


def epoch_s(side: Data) -> float:
    """An epoch at the pace of the run."""
    run = side["run"]
    return float(run["wall_s"] / max(1, run["batches"]) * side["batches_an_epoch"])


def _epoch(row: Data) -> str:
    """Seconds; PyG's way with our pipeline in brackets."""
    more = row["sides"].get("pyg_overlapped")
    own = f"{epoch_s(row):.2f}"
    return own + (f" ({epoch_s(more):.2f})" if more and row["key"] == "pyg" else "")


def verdicts(cells: Data, cases: Cases) -> list[str]:
    """One sentence a target."""
    cuts = {
        name: 1 - part_ms(sides["pydirect"], "copy") / part_ms(sides["pyg"], "copy")
        for name, sides in cases.items()
    }
    least = min(cuts, key=lambda name: cuts[name])
    met = sum(cut >= LEAST_CUT for cut in cuts.values())
    speedups = []
    for name, sides in cases.items():
        ours, more = epoch_s(sides["pydirect"]), sides.get("pyg_overlapped")
        brackets = f" ({epoch_s(more) / ours:.2f}x)" if more else ""
        speedups.append(f"{name} {epoch_s(sides['pyg']) / ours:.2f}x{brackets}")
    worst = max(map(loss_difference, cases.values()))
    lines = [
        f"Copy time cut by {min(cuts.values()):.0%} ({least}) to "
        f"{max(cuts.values()):.0%}; by at least {LEAST_CUT:.0%} in {met} of "
        f"{len(cuts)} cases.",
        f"Epochs over PyG's way (target {LEAST_SPEEDUP}x where features bound "
        f"GraphSAGE; in brackets over PyG's way in our pipeline): "
        f"{', '.join(speedups)}.",
        f"Losses of both sides differ by {worst:.1e} at most (relative).",
    ]
    return lines


def loss_difference(sides: dict[str, Data]) -> float:
    """The largest relative difference of the first losses."""
    ours, theirs = (sides[s]["bars"]["first_losses"] for s in ("pydirect", "pyg"))
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def tiering(*found: Data) -> str:
    """Epochs with hot rows in GPU memory."""
    parts = [part for data in found for part in (_tiers(data["cells"]), where(data))]
    return paragraphs(*parts)


def _tiers(cells: Data) -> str:
    epochs = {name: cell for name, cell in cells.items() if "epoch_s" in cell}

    def over(cell: Data, gpus: str, share: str) -> str:
        other = epochs[f"{cell['name'].split('/')[0]}/{gpus}/{share}"]
        return f"{other['epoch_s'] / cell['epoch_s']:.2f}x"

    def gpus(cell: Data) -> str:
        return str(cell["name"].split("/")[1])

    def share(cell: Data) -> str:
        return str(cell["name"].split("/")[2])

    columns: dict[str, Column] = {
        "rows": lambda c: c["name"].split("/")[0],
        "GPUs": gpus,
        "share": lambda c: f"{float(share(c)):.0%}",
        "hits": "{hit_rate:.2f}",
        "drawing / copying / training": "{drawing_alone_s:.2f} / "
        "{copying_alone_s:.2f} / {training_alone_s:.2f}",
        "epoch s": "{epoch_s:.3f}",
        "untiered": lambda c: over(c, gpus(c), "0.0"),
        "one GPU": lambda c: "-" if gpus(c) == "1 GPU" else over(c, "1 GPU", share(c)),
    }
    best = next((c for name, c in cells.items() if name.startswith("hit rates")), {})
    scored = "weighted_reverse_pagerank"
    told = ", ".join(
        f"{float(part):.0%} of the rows {best[f'{scored} {part}']:.2f} of "
        f"{best[f'best {part}']:.2f}"
        for part in (key.split()[1] for key in best if key.startswith("best "))
    )
    return paragraphs(
        table(epochs, columns), told and f"Hit rates, of the best there are: {told}."
    )
