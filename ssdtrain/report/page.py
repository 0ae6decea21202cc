"""One self-contained HTML page of a run: its figures, its pictures, how it went.

Everything is inline: no script, no font and no picture is fetched, so that the page can
be mailed. Pictures are SVG drawn here, by hand and to scale.
"""

import html
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ssdtrain.errors import ConfigError
from ssdtrain.report.table import ABSENT, WITH, WITHOUT, bytes_text, rows

COLOURS = ("#777777", "#1f77b4", "#d62728", "#2ca02c")
WIDTH, HEIGHT = 760, 260
LEFT, RIGHT, BOTTOM = 70, 20, 45
LEGEND = 18
"""Height of a line of the legend, which stands above the axes."""
NUM_TICKS = 5
"""About so many marks on an axis, at round numbers."""
MAX_POINTS = 1500
"""Of a line; a course is thinned to its highest points between two marks."""
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 60em;
       padding: 0 1em; color: #222; }
table { border-collapse: collapse; margin: 1em 0; }
td, th { border-bottom: 1px solid #ddd; padding: .25em .8em; text-align: left; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
pre { background: #f5f5f5; padding: .8em; overflow-x: auto; white-space: pre-wrap; }
svg { max-width: 100%; height: auto; }
.good { color: #176117; } .bad { color: #b00020; font-weight: bold; }
"""


class Line(NamedTuple):
    """One line of a picture."""

    name: str
    points: Sequence[tuple[float, float]]
    level: float | None = None
    """A dotted line across: the exact peak."""


class Run(NamedTuple):
    """What a run directory holds, as plain values."""

    path: Path
    result: Mapping[str, Any]
    record: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    memory: Mapping[str, Sequence[tuple[float, float]]]
    recorded: Mapping[str, Any]
    config: str


def read_run(path: Path) -> Run:
    """Read a run directory.

    Raises:
        ConfigError: it holds no finished run, or a file is damaged.
    """
    if not (path / "result.json").is_file():
        raise ConfigError(
            f"{path} has no result.json: the run has not finished, or this is no run."
        )
    result = _json(path / "result.json")
    metrics_path, config_path = path / "metrics.jsonl", path / "config.yaml"
    lines = (
        metrics_path.read_text("utf-8").splitlines() if metrics_path.exists() else []
    )
    try:
        metrics = [json.loads(line) for line in lines]
    except ValueError as error:
        raise ConfigError(f"{metrics_path} is damaged ({error})") from error
    return Run(
        path=path,
        result=result,
        record=_json(path / "run.json") if (path / "run.json").exists() else {},
        metrics=metrics,
        memory=_json(path / "memory.json") if (path / "memory.json").exists() else {},
        recorded=result.get("picture") or {},
        config=config_path.read_text("utf-8") if config_path.exists() else "",
    )


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is damaged ({error})") from error


def page(runs: Sequence[Run]) -> str:
    """The page of one run, or of several beside one another."""
    title = " and ".join(run.path.name for run in runs)
    parts = [f"<h1>{_text(title)}</h1>"]
    if len(runs) > 1:
        parts += ["<h2>Compared</h2>", _comparison(runs), _losses(runs)]
    for run in runs:
        if len(runs) > 1:
            parts.append(f"<h2>{_text(run.path.name)}</h2>")
        parts += _sections(run)
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        f"<title>{_text(title)}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _sections(run: Run) -> list[str]:
    parts = [_head(run)]
    if "legs" not in run.result:  # a graph trainer's own figures
        return [*parts, _plain_table(run.result), _details(run)]
    parts.append(_table(run.result))
    if run.memory:
        parts.append(_memory(run))
    if run.metrics:
        parts += [_losses([run]), _steps(run), _waiting(run)]
    explained = (run.result["legs"].get(WITH) or {}).get("explained")
    if explained:
        parts += ["<h3>In words</h3>", f"<pre>{_text(explained)}</pre>"]
    return [*parts, _details(run)]


def _head(run: Run) -> str:
    record, result = run.record, run.result
    versions = ", ".join(f"{k} {v}" for k, v in record.get("versions", {}).items())
    facts = {
        "command": " ".join(record.get("command", [])),
        "started": record.get("started", ABSENT),
        "status": record.get("status", ABSENT),
        "device": result.get("device", ABSENT),
        "ranks": result.get("num_ranks", 1),
        "versions": versions or ABSENT,
        "git": _git(record.get("git")),
    }
    cells = "".join(
        f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>"
        for name, value in facts.items()
    )
    return f"<table>{cells}</table>"


def _git(state: Mapping[str, Any] | None) -> str:
    if not state:
        return "not a git checkout"
    return str(state["commit"])[:12] + (" with changes" if state["changed"] else "")


def _table(result: Mapping[str, Any]) -> str:
    verdict = result.get("verdict", {})
    bad = [name for name, good in verdict.items() if not good]
    names = ", ".join(name.replace("_", " ") for name in (bad or verdict))
    said = "FAILED: " if bad else "verified: "
    kind = "bad" if bad else "good"
    body = "".join(
        f"<tr><td>{_text(row.name)}</td><td class='number'>{_text(row.without)}</td>"
        f"<td class='number'>{_text(row.with_)}</td><td>{_text(row.note)}</td></tr>"
        for row in rows(result)
    )
    head = f"<tr><th></th><th>{WITHOUT}</th><th>{WITH}</th><th></th></tr>"
    summary = f"<p class='{kind}'>{_text(said + names)}</p>" if names else ""
    return f"<table id='figures'>{head}{body}</table>{summary}"


def _plain_table(result: Mapping[str, Any]) -> str:
    body = "".join(
        f"<tr><td>{_text(name)}</td><td>{_text(value)}</td></tr>"
        for name, value in result.items()
    )
    return f"<table id='figures'>{body}</table>"


def _comparison(runs: Sequence[Run]) -> str:
    """The rows of every run's `with` column side by side."""
    columns = [{row.name: row.with_ for row in rows(run.result)} for run in runs]
    names = list(dict.fromkeys(name for column in columns for name in column))
    head = "".join(f"<th>{_text(run.path.name)}</th>" for run in runs)
    body = ""
    for name in names:
        cells = [column.get(name, ABSENT) for column in columns]
        marked = "".join(f"<td class='number'>{_text(cell)}</td>" for cell in cells)
        body += f"<tr><td>{_text(name)}</td>{marked}</tr>"
    changed = _changed(runs)
    settings = f"<h3>Settings that differ</h3><pre>{_text(changed)}</pre>"
    return f"<table id='compared'><tr><th></th>{head}</tr>{body}</table>{settings}"


def _changed(runs: Sequence[Run]) -> str:
    own = [set(run.config.splitlines()) for run in runs]
    shared = set.intersection(*own)
    lines = []
    for run in runs:
        lines.append(f"{run.path.name}:")
        lines += [line for line in run.config.splitlines() if line not in shared]
    return "\n".join(lines)


def _memory(run: Run) -> str:
    picture = run.recorded
    peaks = picture.get("peak_bytes", {})
    lines = [
        Line(
            f"{name}, peak {bytes_text(peaks.get(name, _highest(course)))}",
            [(ms, num_bytes / 1e6) for ms, num_bytes in course],
            peaks.get(name, _highest(course)) / 1e6,
        )
        for name, course in run.memory.items()
    ]
    where = f"step {picture.get('step', '?')} (the last), rank {picture.get('rank', 0)}"
    title = f"Memory over {where}: {run.result.get('peak_of', '')}"
    return _figure(title, lines, "time since the step began (ms)", "MB")


def _highest(course: Sequence[tuple[float, float]]) -> float:
    return max((num_bytes for _, num_bytes in course), default=0.0)


def _losses(runs: Sequence[Run]) -> str:
    several = len(runs) > 1
    lines = [
        Line(f"{run.path.name}, {leg}" if several else leg, points)
        for run in runs
        for leg, points in _by_leg(run, "loss", 1.0).items()
        if not several or leg == WITH
    ]
    return _figure("Loss by step", lines, "step", "loss", from_zero=False)


def _steps(run: Run) -> str:
    lines = [Line(leg, points) for leg, points in _by_leg(run, "step_ms", 1.0).items()]
    return _figure("Time of each step, first rank", lines, "step", "ms")


def _waiting(run: Run) -> str:
    """Where the device waited, and what rebuilding took."""
    lines = [
        Line(name, points)
        for name, key in (
            ("stalled for a transfer", "stall_ms"),
            ("rebuilding", "recompute_ms"),
        )
        if (points := _by_leg(run, key, 1.0).get(WITH))
    ]
    title = "Waiting and rebuilding in each step with ssdtrain, first rank"
    return _figure(title, lines, "step", "ms") if lines else ""


def _by_leg(run: Run, key: str, scale: float) -> dict[str, list[tuple[float, float]]]:
    """(step from 1, value) by leg; a step that was run again counts as it ended."""
    found: dict[str, dict[int, float]] = {}
    for line in run.metrics:
        if isinstance(line.get(key), int | float):
            found.setdefault(line["leg"], {})[line["step"] + 1] = line[key] * scale
    return {leg: sorted(values.items()) for leg, values in found.items()}


def _details(run: Run) -> str:
    config = f"<details><summary>config.yaml</summary><pre>{_text(run.config)}</pre>"
    values = json.dumps(run.result, indent=1)
    result = f"<details><summary>result.json</summary><pre>{_text(values)}</pre>"
    return f"{config}</details>{result}</details>"


def _text(value: object) -> str:
    return html.escape(str(value))


# -- pictures -------------------------------------------------------------------------


def _figure(
    title: str, lines: Sequence[Line], x_name: str, y_name: str, from_zero: bool = True
) -> str:
    """A line picture to scale; the vertical axis starts at 0 unless told otherwise."""
    points = [point for line in lines for point in line.points]
    if not points:
        return ""
    levels = [line.level for line in lines if line.level is not None]
    values = [*(y for _, y in points), *levels]
    top = 24 + LEGEND * len(lines)
    frame = _Frame(
        _marks([x for x, _ in points]),
        _marks([0.0, *values] if from_zero else values),
        top,
    )
    drawn = [_axes(frame, x_name, y_name)]
    for number, line in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(frame.at(x, y) for x, y in _thinned(line.points))
        style = f"fill='none' stroke='{colour}' stroke-width='1.8'"
        drawn.append(f"<polyline points='{path}' {style}/>")
        if line.level is not None:
            ends = " ".join(frame.at(x, line.level) for x in frame.x_range)
            drawn.append(
                f"<polyline points='{ends}' fill='none' stroke='{colour}' "
                "stroke-dasharray='2 3'/>"
            )
        drawn.append(
            f"<text x='{LEFT}' y='{12 + LEGEND * number}' fill='{colour}' "
            f"font-size='12'>\u2014 {_text(line.name)}</text>"
        )
    height = top + HEIGHT
    box = f"viewBox='0 0 {WIDTH} {height}' width='{WIDTH}' height='{height}'"
    svg = f"<svg {box} role='img' aria-label='{_text(title)}'>{''.join(drawn)}</svg>"
    return f"<h3>{_text(title)}</h3>{svg}"


def _marks(values: Sequence[float]) -> list[float]:
    """Round numbers from at most the least value to at least the largest."""
    low, high = min(values), max(values)
    if high <= low:
        low, high = low - 0.5, high + 0.5
    rough = (high - low) / NUM_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * n for n in (1, 2, 5, 10) if power * n >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [index * step for index in range(first, last + 1)]


class _Frame(NamedTuple):
    """The axes' marks, and where they are on the picture."""

    x_marks: Sequence[float]
    y_marks: Sequence[float]
    top: int

    @property
    def x_range(self) -> tuple[float, float]:
        return self.x_marks[0], self.x_marks[-1]

    @property
    def bottom(self) -> int:
        return self.top + HEIGHT - BOTTOM

    def across(self, x: float) -> float:
        low, high = self.x_range
        return LEFT + (x - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def down(self, y: float) -> float:
        low, high = self.y_marks[0], self.y_marks[-1]
        return self.bottom - (y - low) / (high - low) * (self.bottom - self.top)

    def at(self, x: float, y: float) -> str:
        return f"{self.across(x):.1f},{self.down(y):.1f}"


def _axes(frame: _Frame, x_name: str, y_name: str) -> str:
    grey, small = "stroke='#ddd' stroke-width='1'", "font-size='11'"
    right = WIDTH - RIGHT
    parts = []
    for mark in frame.y_marks:
        y = frame.down(mark)
        parts += [
            f"<line x1='{LEFT}' x2='{right}' y1='{y:.1f}' y2='{y:.1f}' {grey}/>",
            f"<text x='{LEFT - 6}' y='{y + 4:.1f}' text-anchor='end' {small}>"
            f"{mark:.6g}</text>",
        ]
    for mark in frame.x_marks:
        x = frame.across(mark)
        parts.append(
            f"<text x='{x:.1f}' y='{frame.bottom + 16}' text-anchor='middle' {small}>"
            f"{mark:.6g}</text>"
        )
    middle, centre = (LEFT + right) / 2, (frame.top + frame.bottom) / 2
    parts.append(
        f"<text x='{middle}' y='{frame.bottom + 36}' text-anchor='middle' "
        f"font-size='12'>{_text(x_name)}</text>"
        f"<text x='14' y='{centre}' font-size='12' text-anchor='middle' "
        f"transform='rotate(-90 14 {centre})'>{_text(y_name)}</text>"
    )
    return "".join(parts)


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `MAX_POINTS` points: of each stretch the highest, so no peak is lost."""
    if len(points) <= MAX_POINTS:
        return list(points)
    stretch = -(-len(points) // MAX_POINTS)
    starts = range(0, len(points), stretch)
    return [max(points[at : at + stretch], key=lambda p: p[1]) for at in starts]
