"""What safety costs and what was searched."""

from collections import Counter

from recipes.bench.harness.records import Data
from recipes.bench.harness.tables import Column, paragraphs, table, where

TARGET = 1.03
"""Of `verify="checksum"`: step time over `verify="off"`."""


def verify(data: Data) -> str:
    """What `verify` costs under each plan."""
    cells = {n: c for n, c in data["cells"].items() if "over_off" in c}
    met = all(cell["over_off"]["checksum"] <= TARGET for cell in cells.values())
    columns: dict[str, Column] = {
        "hidden x layers, plan": "{name}",
        "`checksum` / off": "{over_off[checksum]:.3f}x",
        "`shadow` / off": "{over_off[shadow]:.3f}x",
        "peak GB off": "{peak_gb[off]:.2f}",
        "checksum": "{peak_gb[checksum]:.2f}",
        "shadow": "{peak_gb[shadow]:.2f}",
        "tensors verified": "{num_verified[checksum]}",
        "GB": "{verified_gb:.2f}",
    }
    told = f"Target {TARGET:.2f} for `checksum`: {'met' if met else 'NOT met'}."
    return f"{told}\n\n{table(cells, columns)}"


def sanitize(data: Data) -> str:
    """Each process of the race checks, what it should say and what it did."""
    found = [_found(cell) for cell in data["cells"].values()]
    columns: dict[str, Column] = {
        "process": "{name}",
        "expected": "{expects}",
        "found": _found,
        "races reported": "{races_reported}",
        "s": "{seconds}",
    }
    return (
        f"{found.count('as expected')} of {len(found)} processes ended as they should."
        f"\n\n{table(data['cells'], columns)}"
    )


def _found(cell: Data) -> str:
    """The verdict; what was not as expected with the process's own words, if short."""
    verdict = str(cell.get("verdict", cell.get("error", "-")))
    lines = cell.get("tail", "").splitlines()
    said = [line for line in lines if "this proves nothing" in line]
    return f"{verdict}: {said[-1]}" if said else verdict


def mutants(data: Data) -> str:
    """Random breaks of a package, and how many its tests notice."""
    settings = data["settings"]
    noticed = Counter(c.get("noticed_by", "error") for c in data["cells"].values())
    dead = noticed.total() - noticed["nothing"] - noticed["error"]
    return (
        f"**Random breaks of {settings['package']}**: {dead} of {noticed.total()} "
        f"noticed by its tests on a CPU ({noticed['hung']} by hanging), of "
        f"{settings['number']} drawn with seed {settings['seed']}; files drawn with "
        "equal weight."
    )


SEARCHES = {
    "graphs_cpu": "Random graphs: {graphs:,} of {num_features} features; {equal:,} "
    "equal, {refused:,} refused where plain autograd refuses, **{num_different} "
    "different**.",
    "surprises_cpu": "Random models that change their ways after a plan was made: "
    "{graphs:,} graphs of {models:,} models, each under three plans; {equal:,} runs "
    "equal, {raised_by_both:,} raised as plain did, {raised_alone:,} raised alone "
    "(docs/safety.md), **{num_different} different**.",
    "opinfo_cpu": "torch's operator database: {operators:,} operators, {samples:,} "
    "samples; {verdicts[equal]:,} equal, {verdicts[refused]:,} refused by both, "
    "{verdicts[refused by ssdtrain]} by ssdtrain alone (docs/safety.md), "
    "**{num_different} different**.",
    "fault_soak_cpu": "Random faults: {num_faults} of {kinds} kinds planted in "
    "{steps:,} steps; {ends[equal]:,} steps equal, {caught} stopped with an error that "
    "names the tensor, {others} ended by the program's own errors or dropped, "
    "**{ends[WRONG]} wrong**; resident memory {levels[0][resident_mib]:.0f} to "
    "{last[resident_mib]:.0f} MiB, {num_left} files and {num_threads} threads left.",
    "graph_programs_cpu": "Graph programs (writes between calls, modes, dtypes, "
    "defaults, `torch.compile`): {graphs:,} of {num_features} features, hector's kept "
    "objects against fresh ones, byte for byte, and in float64 against loops: "
    "{equal:,} equal, **{num_different} different**.",
    "interrupts": "Ctrl-C at random moments: {signals:,} in {blocks} processes; "
    "**{lost}** lost, **{num_bad}** times something left over or another gradient in "
    "the next step.",
}
"""What the campaign of each record says."""


def searches(*found: Data) -> str:
    """Random searches for what is wrong, one line each."""
    lines = []
    for data in found:
        name, cells = data["file"], data["cells"]
        if name == "leaks":
            told = _leaks(cells)
        else:
            cell = next(cells[n] for n in ("campaign", "total", "soak") if n in cells)
            told = SEARCHES[name].format_map(_counted(cell))
        lines.append(f"- {told} ({where(data)})")
    return "\n".join(lines)


def _counted(cell: Data) -> Data:
    """What a campaign found, with its lists counted."""
    ends, verdicts = Counter(cell.get("ends")), Counter(cell.get("verdicts"))
    raised = ends["lost, and named"] + ends["changed, found by verify"]
    faults = cell.get("faults", {})
    return {
        **cell,
        "ends": ends,
        "verdicts": verdicts,
        "samples": verdicts.total(),
        "caught": raised,
        "others": ends.total() - ends["equal"] - ends["WRONG"] - raised,
        "num_faults": sum(faults.values()),
        "kinds": len(faults),
        "last": (cell.get("levels") or [{}])[-1],
        "num_left": len(cell.get("left_on_disk", ())),
        "num_threads": len(cell.get("threads_left", ())),
        "num_features": len(cell.get("features", ())),
        "num_different": len(cell.get("different", ())),
        "num_bad": len(cell.get("bad", ())),
    }


def _leaks(cells: Data) -> str:
    return " ".join(
        "Resident memory ({what}) over {steps:,} steps: {bytes_a_step:.1f} bytes a "
        "step after the first 1,000, {bytes_a_step_second_half:.1f} in the second half "
        "(target 10); {malloc_kb:+.0f} kB of the C library's memory in use, "
        "{more_blocks:+,} blocks of Python's.".format(
            **cell,
            what="the same steps without ssdtrain" if name == "plain" else name,
            malloc_kb=cell["more_malloc_bytes"] / 1000,
        )
        for name, cell in cells.items()
        if "more_malloc_bytes" in cell
    )


def zoo(data: Data) -> str:
    """How every architecture fares, by library, and why some are not equal."""
    libraries: dict[str, dict[str, Data]] = {}
    for name, cell in data["cells"].items():
        library, _, own = name.partition("/")
        libraries.setdefault(library, {})[own] = cell
    rows, reasons = [], []
    for library, cells in sorted(libraries.items()):
        said = Counter(map(_said, cells.values()))
        again = sum(map(_runs_again, cells.values()))
        rows.append({"library": library, "n": len(cells), "said": said, "again": again})
        reasons += _reasons(library, cells)
    columns: dict[str, Column] = {
        "library": "{library}",
        "types": "{n}",
        "plain runs": lambda row: str(row["n"] - row["said"]["plain fails"]),
        "equal": "{said[equal]}",
        "of them with layers run again": "{again}",
        "refused": "{said[refused]}",
        "different": "{said[different]}",
        "crash": "{said[crash]}",
        "plain fails": "{said[plain fails]}",
    }
    return paragraphs(table(rows, columns), "\n".join(reasons))


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
            way = next((w for word, w in WAYS.items() if word in cell["why"]), OTHER)
            fails.setdefault(way, []).append(name)
            continue
        own = [v for v in cell.get("variants", {}).values() if isinstance(v, dict)]
        whys = [v["why"] for v in own if "why" in v] or [str(cell.get("why", ""))]
        lines.append(f"- {library}/{name}: {_said(cell)}: {whys[0][:200]}")
    for way, names in sorted(fails.items(), key=lambda item: -len(item[1])):
        lines.append(f"- {library}, plain fails, {way}: {', '.join(names)}")
    return lines


WAYS = {
    "requires the": "needs a library that is not there",
    "parameters are too many": "no small configuration",
    "two plain runs differ": "two plain runs differ",
    "not finite": "the loss is not finite",
    "no result of this model has a gradient": "nothing to differentiate",
    'missing the required "forward"': "has no forward",
}
OTHER = "no tiny configuration or inputs for it were found"


def survival(data: Data) -> str:
    """Who survives what: a row a program, a column a contender."""
    evidence, notes = data["settings"]["evidence"], list[str]()
    columns: dict[str, Column] = {"program": "{program}"}
    for who, cell in data["cells"].items():
        columns[who] = lambda row, cell=cell: _short(cell, row["name"], notes)
    rows = {
        name: {"program": f"{name.replace('_', ' ')} ({source})"}
        for name, source in evidence.items()
    }
    sound = [
        sum(
            verdict in ("equal", "refused")
            for verdict in c.get("verdicts", {}).values()
        )
        for c in data["cells"].values()
    ]
    counts = " | ".join(f"{count} of {len(evidence)}" for count in sound)
    text = table(rows, columns, line="--")
    errors = "\n".join(f"{at}. {note}" for at, note in enumerate(notes, 1))
    return paragraphs(f"{text}\n| **sound** | {counts} |", errors)


def _short(cell: Data, name: str, notes: list[str]) -> str:
    verdicts = cell.get("verdicts")
    known = isinstance(verdicts, dict)
    verdict = str(verdicts.get(name, "-") if known else cell.get("error", "-"))
    if verdict in ("equal", "refused", "-"):
        return verdict
    if verdict.startswith("WRONG"):
        return "**WRONG**"
    if verdict not in notes:
        notes.append(verdict)
    return f"error ({notes.index(verdict) + 1})"
