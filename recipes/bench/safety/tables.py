"""What safety costs and what was searched, from `results/*.json`; never typed."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from recipes.bench.common.results import Data, find
from recipes.bench.common.text import markdown, where

TARGET = 1.03
"""Of `verify="checksum"`: step time over `verify="off"`."""

NOTHING = "this proves nothing"
HOWS = ("off", "checksum", "shadow")


def verify(data: Data) -> str:
    """What `verify` costs under each plan."""
    rows, met = [], []
    for name, cell in data["cells"].items():
        if "over_off" not in cell:
            continue
        ratios, peaks = cell["over_off"], cell["peak_gb"]
        met.append(ratios["checksum"] <= TARGET)
        rows.append(
            [
                name,
                f"{ratios['checksum']:.3f}x",
                f"{ratios['shadow']:.3f}x" if "shadow" in ratios else "-",
                *(f"{peaks[how]:.2f}" if how in peaks else "-" for how in HOWS),
                str(cell["num_verified"]["checksum"]),
                f"{cell['verified_gb']:.2f}",
            ]
        )
    head = ["hidden x layers, plan", "`checksum` / off", "`shadow` / off"]
    head += ["peak GB off", "checksum", "shadow", "tensors verified", "GB"]
    settings = data["settings"]
    text = (
        "**What `verify` costs**: GPT blocks, batch "
        f"{settings['batch']}, sequence {settings['sequence']}; step time over the "
        f'same plan with `verify="off"`, in turns. Target {TARGET:.2f} for `checksum`: '
        f"{'met' if all(met) else 'NOT met'}."
    )
    return f"{text}\n\n{markdown(head, rows)}\n\n{where(data)}"


def self_check(data: Data) -> str:
    """What the checks that are always on cost."""
    rows = []
    for name, cell in data["cells"].items():
        if "over" not in cell:
            continue
        low, high = (f"{100 * (end - 1):+.2f}" for end in cell["interval"])
        over = f"{100 * (cell['over'] - 1):+.2f} %"
        rows.append([name, f"{cell['step_ms']:.1f}", over, f"{low} to {high} %"])
    settings = data["settings"]
    text = (
        "**What the checks cost that are always on** (one rebuilt tensor in 64 is "
        "compared, no recipe passes a changed tensor): GPT blocks, batch "
        f"{settings['batch']}, sequence {settings['sequence']}; steps with them over "
        f"steps without, {settings['pairs']} pairs in turns."
    )
    head = ["hidden x layers, plan", "step, ms", "cost", "95 % interval"]
    return f"{text}\n\n{markdown(head, rows)}\n\n{where(data)}" if rows else ""


def sanitize(data: Data) -> str:
    """Each process of the race checks, what it should say and what it did."""
    rows = [
        [
            name,
            str(cell.get("expects", "-")),
            _found(cell),
            str(cell.get("races_reported", "-")),
            str(cell.get("seconds", "-")),
        ]
        for name, cell in data["cells"].items()
    ]
    met = sum(row[2] == "as expected" for row in rows)
    text = (
        "**Races on a GPU**: the law under torch's stream sanitizer, steps with late "
        "copies and poisoned blocks, NVIDIA's compute-sanitizer; a wait that is "
        f"planted out must show. {met} of {len(rows)} processes ended as they should."
    )
    head = ["process", "expected", "found", "races reported", "s"]
    return f"{text}\n\n{markdown(head, rows)}\n\n{where(data)}"


def _found(cell: Data) -> str:
    """The verdict; what was not as expected with the process's own words, if short."""
    verdict = str(cell.get("verdict", cell.get("error", "-")))
    said = [line for line in cell.get("tail", "").splitlines() if NOTHING in line]
    return f"{verdict}: {said[-1]}" if said else verdict


def mutants(data: Data) -> str:
    """Random breaks of a package, and how many its tests notice."""
    cells, settings = data["cells"].values(), data["settings"]
    package = settings["package"]
    noticed = Counter(cell.get("noticed_by", "error") for cell in cells)
    dead = noticed.total() - noticed["nothing"] - noticed["error"]
    text = (
        f"**Random breaks of {package}**: {dead} of {noticed.total()} noticed by its "
        f"tests on a CPU ({noticed['hung']} by hanging), of {settings['number']} drawn "
        f"with seed {settings['seed']}; files drawn with equal weight."
    )
    return f"{text}\n\n{where(data)}"


def searches(results: Path) -> str:
    """Random searches for what is wrong, one line each."""
    rows = []
    for name, line in SEARCHES.items():
        data = find(results / f"{name}.json")
        if data is not None:
            rows.append(f"- {line(data['cells'])} ({where(data)})")
    if not rows:
        return ""
    text = "**Searches for wrong gradients**, byte for byte against plain autograd."
    return "\n".join([text, "", *rows])


def _graphs(cells: Data) -> str:
    cell = cells["campaign"]
    return (
        f"Random graphs: {cell['graphs']:,} of {len(cell['features'])} features; "
        f"{cell['equal']:,} equal, {cell['refused']:,} refused where plain autograd "
        f"refuses, **{len(cell['different'])} different**."
    )


def _surprises(cells: Data) -> str:
    cell = cells["campaign"]
    raised = cell["raised_by_both"], cell["raised_alone"]
    return (
        f"Random models that change their ways after a plan was made: "
        f"{cell['graphs']:,} graphs of {cell['models']:,} models, each under three "
        f"plans; {cell['equal']:,} runs equal, {raised[0]:,} raised as plain did, "
        f"{raised[1]:,} raised alone (docs/safety.md), "
        f"**{len(cell['different'])} different**."
    )


def _operators(cells: Data) -> str:
    cell = cells["total"]
    verdicts, different = Counter(cell["verdicts"]), len(cell["different"])
    own = verdicts["refused by ssdtrain"]
    return (
        f"torch's operator database: {cell['operators']:,} operators, "
        f"{verdicts.total():,} samples; {verdicts['equal']:,} equal, "
        f"{verdicts['refused']:,} refused by both, {own} by ssdtrain alone "
        f"(docs/safety.md), **{different} different**."
    )


def _faults(cells: Data) -> str:
    cell = cells["soak"]
    ends, faults = Counter(cell["ends"]), cell["faults"]
    caught = ends["lost, and named"] + ends["changed, found by verify"]
    others = ends.total() - ends["equal"] - ends["WRONG"] - caught
    first, last = cell["levels"][0], cell["levels"][-1]
    return (
        f"Random faults: {sum(faults.values())} of {len(faults)} kinds planted in "
        f"{cell['steps']:,} steps; {ends['equal']:,} steps equal, {caught} stopped "
        f"with an error that names the tensor, {others} ended by the program's own "
        f"errors or dropped, **{ends['WRONG']} wrong**; resident memory "
        f"{first['resident_mib']:.0f} to {last['resident_mib']:.0f} MiB, "
        f"{len(cell['left_on_disk'])} files and {len(cell['threads_left'])} threads "
        "left."
    )


def _relational(cells: Data) -> str:
    cell = cells["campaign"]
    return (
        f"hector's layers on {cell['graphs']:,} random relational graphs of "
        f"{len(cell['features'])} features, against loops in float64: "
        f"{cell['equal']:,} alike, **{len(cell['different'])} different**."
    )


def _graph_programs(cells: Data) -> str:
    cell = cells["campaign"]
    return (
        f"Graph programs (writes between calls, modes, dtypes, defaults, "
        f"`torch.compile`): {cell['graphs']:,} of {len(cell['features'])} features, "
        f"hector's kept objects against fresh ones, byte for byte, and against loops "
        f"in float64: {cell['equal']:,} equal, **{len(cell['different'])} different**."
    )


def _damaged(cells: Data) -> str:
    cell = cells["campaign"]
    return (
        f"Damaged files: {cell['total']:,} of {len(cell['files'])} kinds read; each "
        f"loaded or was refused by name, but for **{len(cell['bad'])}**."
    )


def _interrupts(cells: Data) -> str:
    cell = cells["campaign"]
    return (
        f"Ctrl-C at random moments: {cell['signals']:,} in {cell['blocks']} processes; "
        f"**{cell['lost']}** lost, **{len(cell['bad'])}** times something left over "
        "or another gradient in the next step."
    )


def zoo(data: Data) -> str:
    """How every architecture fares, by library, and why some are not equal."""
    rows, reasons = [], list[str]()
    for library in sorted({name.partition("/")[0] for name in data["cells"]}):
        cells = {
            name.partition("/")[2]: cell
            for name, cell in data["cells"].items()
            if name.startswith(f"{library}/")
        }
        said = Counter(_said(cell) for cell in cells.values())
        ran = len(cells) - said["plain fails"]
        again = sum(_runs_again(cell) for cell in cells.values())
        others = [str(said[verdict]) for verdict in ("refused", "different", "crash")]
        counts = [len(cells), ran, said["equal"], again, *others, said["plain fails"]]
        rows.append([library, *map(str, counts)])
        reasons += _reasons(library, cells)
    text = (
        "**Every architecture there is.** A tiny model of every model type of "
        "transformers, of every module of timm and of the models of diffusers, plain "
        "and under five imposed plans, ten steps each, `min_bytes=1`: everything to "
        "host memory; everything with a recipe made again and the rest on the SSD; "
        "the search's plan for a small budget; all regions; a random plan. Equal: "
        "all losses, gradients, weights, buffers and random numbers, byte for byte, "
        "while at least 90 % of what autograd saved moved or was made again, or "
        "regions ran again."
    )
    head = ["library", "types", "plain runs", "equal", "of them with layers run again"]
    head += ["refused", "different", "crash", "plain fails"]
    table = markdown(head, rows)
    return "\n\n".join([text, table, "\n".join(reasons), where(data)])


def _said(cell: Data) -> str:
    verdict = str(cell.get("verdict", "crash"))
    return "crash" if verdict in ("no plan", "unmoved") else verdict


def _runs_again(cell: Data) -> bool:
    """Whether it is equal, and layers of it ran again."""
    own = cell.get("variants", {}).values() if cell.get("verdict") == "equal" else ()
    return any(isinstance(v, dict) and v["bytes"]["regions"] > 0 for v in own)


def _reasons(library: str, cells: Data) -> list[str]:
    """A line for each type that ran plain and is not equal, and one for each way in
    which plain fails."""
    lines = []
    fails: dict[str, list[str]] = {}
    for name, cell in cells.items():
        if _said(cell) == "equal":
            continue
        if _said(cell) == "plain fails":
            fails.setdefault(_way(cell["why"]), []).append(name)
            continue
        own = [v for v in cell.get("variants", {}).values() if isinstance(v, dict)]
        whys = [v["why"] for v in own if "why" in v] or [str(cell.get("why", ""))]
        lines.append(f"- {library}/{name}: {_said(cell)}: {whys[0][:200]}")
    for way, names in sorted(fails.items(), key=lambda item: -len(item[1])):
        lines.append(f"- {library}, plain fails, {way}: {', '.join(names)}")
    return lines


def _way(why: str) -> str:
    """In which way plain fails; anything else is that no inputs for it were found."""
    for word, way in WAYS.items():
        if word in why:
            return way
    return "no tiny configuration or inputs for it were found"


WAYS = {
    "requires the": "needs a library that is not there",
    "parameters are too many": "no small configuration",
    "two plain runs differ": "two plain runs differ",
    "not finite": "the loss is not finite",
    "no result of this model has a gradient": "nothing to differentiate",
    'missing the required "forward"': "has no forward",
}


LEAKS = {"plain": "the same steps without ssdtrain"}


def _leaks(cells: Data) -> str:
    lines = []
    for name, cell in cells.items():
        if "more_malloc_bytes" not in cell:
            continue
        lines.append(
            f"Resident memory ({LEAKS.get(name, name)}) over {cell['steps']:,} steps: "
            f"{cell['bytes_a_step']:.1f} bytes a step after the first 1,000, "
            f"{cell['bytes_a_step_second_half']:.1f} in the second half (target 10); "
            f"{cell['more_malloc_bytes'] / 1000:+.0f} kB of the C library's memory in "
            f"use, {cell['more_blocks']:+,} blocks of Python's."
        )
    return " ".join(lines)


def stale(data: Data) -> str:
    """What each call pays to notice changes of its graph's tensors."""
    rows = []
    for c in data["cells"].values():
        host = c["host_us_with"] - c["host_us_without"]
        share = f"{100 * c['share_device']:.1f} %"
        rows.append([f"{c['edges']:,}", f"{host:.0f} us", share])
    return (
        "**Changed graphs.** What a forward call of an RGCN layer pays to notice what "
        "`.data` or another library wrote into its graph's tensors: host time, and the "
        "share of the call's time on the device.\n\n"
        + markdown(["edges", "host", "device"], rows)
        + f"\n\n{where(data)}"
    )


SEARCHES: dict[str, Callable[[Data], str]] = {
    "graphs_cpu": _graphs,
    "surprises_cpu": _surprises,
    "opinfo_cpu": _operators,
    "fault_soak_cpu": _faults,
    "relational_cpu": _relational,
    "relational_cuda": _relational,
    "graph_programs_cpu": _graph_programs,
    "damaged_files": _damaged,
    "interrupts": _interrupts,
    "leaks": _leaks,
}
"""Records of random searches, and the line that each becomes."""


def survival(results_dir: Path) -> str:
    """A markdown table; empty if nothing was recorded."""
    data = find(results_dir / "survival.json")
    if data is None:
        return ""
    cells = data["cells"]
    evidence = data["settings"]["evidence"]
    head = ["program", *cells]
    rows, notes = [], list[str]()
    for name, source in evidence.items():
        row = [f"{name.replace('_', ' ')} ({source})"]
        row += [_short(cell, name, notes) for cell in cells.values()]
        rows.append(row)
    sound = [sum(map(_sound, c.get("verdicts", {}).values())) for c in cells.values()]
    counts = [f"{count} of {len(evidence)}" for count in sound]
    rows.append(["**sound**", *counts])
    text = (
        "**Who survives what.** Programs that have broken activation offloading, and "
        "their gradients against plain autograd's, byte for byte. `WRONG` is silent: "
        "no error, other gradients (or a result where plain autograd refuses)."
    )
    errors = "\n".join(f"{at}. {note}" for at, note in enumerate(notes, 1))
    table = markdown(head, rows, "--")
    return "\n\n".join(part for part in (text, table, errors, where(data)) if part)


def _sound(verdict: str) -> bool:
    return verdict in ("equal", "refused")


def _short(cell: dict[str, object], name: str, notes: list[str]) -> str:
    verdicts = cell.get("verdicts")
    if not isinstance(verdicts, dict):
        verdict = str(cell.get("error", "-"))
    else:
        verdict = str(verdicts.get(name, "-"))
    if _sound(verdict) or verdict == "-":
        return verdict
    if verdict.startswith("WRONG"):
        return "**WRONG**"
    if verdict not in notes:
        notes.append(verdict)
    return f"error ({notes.index(verdict) + 1})"
