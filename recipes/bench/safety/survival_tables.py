"""The table of who survives what, from `results/survival.json`; never typed."""

import json
from pathlib import Path


def survival(results_dir: Path) -> str:
    """A markdown table; empty if nothing was recorded."""
    path = results_dir / "survival.json"
    if not path.exists():
        return ""
    data = json.loads(path.read_text())
    cells, env = data["cells"], data["environment"]
    evidence = data["settings"]["evidence"]
    head = ["program", *cells]
    lines = ["| " + " | ".join(head) + " |", "|--|" + "--|" * len(cells)]
    notes: list[str] = []
    for name, source in evidence.items():
        row = [f"{name.replace('_', ' ')} ({source})"]
        row += [_short(cell, name, notes) for cell in cells.values()]
        lines.append("| " + " | ".join(row) + " |")
    sound = [sum(map(_sound, c.get("verdicts", {}).values())) for c in cells.values()]
    counts = [f"{count} of {len(evidence)}" for count in sound]
    lines.append("| **sound** | " + " | ".join(counts) + " |")
    text = (
        "**Who survives what.** Programs that have broken activation offloading, and "
        "their gradients against plain autograd's, byte for byte. `WRONG` is silent: "
        "no error, other gradients (or a result where plain autograd refuses)."
    )
    versions = ", ".join(f"{k} {v}" for k, v in sorted(env["versions"].items()))
    where = f"{env['device']}; {versions}; `{env['command']}`"
    errors = "\n".join(f"{at}. {note}" for at, note in enumerate(notes, 1))
    table = "\n".join(lines)
    return "\n\n".join(part for part in (text, table, errors, where) if part)


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
