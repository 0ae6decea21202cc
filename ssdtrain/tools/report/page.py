"""One self-contained HTML page of a run: figures, pictures, how it went; nothing
fetched."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

from ssdtrain.errors import ConfigError, DamagedFileError
from ssdtrain.plan.plan import PLAN_FILE, Plan
from ssdtrain.plan.profile import PROFILE_FILE, Profile
from ssdtrain.plan.words import rows as module_rows
from ssdtrain.quantities import ABSENT, bytes_text
from ssdtrain.tools.report.frontier import frontier, point_of
from ssdtrain.tools.report.pictures import (
    TIME,
    Bar,
    Dot,
    Line,
    escaped,
    figure,
    memory_lines,
    time_line,
)
from ssdtrain.tools.report.table import (
    WITH,
    WITHOUT,
    TableRow,
    caption,
    figures,
    result_rows,
    steps_of,
)

T = TypeVar("T")
RESULT = "result.json"
TRACE_ROWS = ("compute", "store", "write", "read", "load")
NUM_STALLS = 10
OBSERVING, FOLLOWING = "observing", "following"
"""Phases of a step in metrics.jsonl."""
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


class RunFiles(NamedTuple):
    """What a run directory holds, as plain values."""

    path: Path
    result: Mapping[str, Any]
    record: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    memory: Mapping[str, Sequence[tuple[float, float]]]
    recorded: Mapping[str, Any]
    config: str
    trace: Sequence[Mapping[str, Any]] = ()
    """Events of the time line."""
    profile: Profile | None = None
    plan: Plan | None = None
    """What the first rank observed, and the plan it ended with."""

    @property
    def name(self) -> str:
        """Of its directory; a sweep's runs are numbers there."""
        own = self.path.name
        return f"{self.path.parent.name}/{own}" if own.isdecimal() else own


def runs_of(path: Path) -> list[Path]:
    """Return the finished runs of a sweep in their order; a run is its own."""
    if (path / RESULT).is_file():
        return [path]
    found = [each.parent for each in path.glob(f"*/{RESULT}")]
    return sorted(found, key=lambda each: (len(each.name), each.name)) or [path]


def read_run(path: Path) -> RunFiles:
    """Read a run directory. ConfigError: no finished run, or a damaged file."""
    if not (path / RESULT).is_file():
        if (path / "run.json").is_file():
            ended = sorted(path.parent.glob(f"*/{RESULT}"), reverse=True)
            own = [each.parent for each in ended if not each.parent.is_symlink()]
            newest = f" The newest that ended: {own[0]}." if own else ""
            why = f"the run has not finished, or was stopped.{newest}"
            raise ConfigError(f"{path} has no {RESULT}: {why}")
        raise ConfigError(f"{path} has no {RESULT}: this is no run's directory.")
    result = _json(path / RESULT)
    metrics_path, config_path = path / "metrics.jsonl", path / "config.yaml"
    text = metrics_path.read_text("utf-8") if metrics_path.exists() else ""
    try:
        metrics = [json.loads(line) for line in text.splitlines()]
    except ValueError as error:
        raise ConfigError(f"{metrics_path} is damaged ({error})") from error
    trace, record, memory = (
        _optional(_json, path / f"{name}.json") or {}
        for name in ("trace", "run", "memory")
    )
    try:
        profile = _optional(PROFILE_FILE.read, path / "profile.json")
        plan = _optional(PLAN_FILE.read, path / "plan.json")
    except DamagedFileError as error:
        raise ConfigError(str(error)) from error
    return RunFiles(
        path=path,
        result=result,
        record=record,
        metrics=metrics,
        memory=memory,
        recorded=result.get("picture") or {},
        config=config_path.read_text("utf-8") if config_path.exists() else "",
        trace=trace.get("traceEvents", ()),
        profile=profile,
        plan=plan,
    )


def _optional(read: Callable[[Path], T], path: Path) -> T | None:
    return read(path) if path.is_file() else None


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is damaged ({error})") from error


def page(runs: Sequence[RunFiles]) -> str:
    """Write the page of one run, or of several next to one another."""
    title = " and ".join(run.name for run in runs)
    parts = [f"<h1>{escaped(title)}</h1>"]
    if len(runs) > 1:
        parts += ["<h2>Compared</h2>", _comparison(runs), _losses(runs)]
    for run in runs:
        if len(runs) > 1:
            parts.append(f"<h2>{escaped(run.name)}</h2>")
        parts += _sections(run)
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        f"<title>{escaped(title)}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _sections(run: RunFiles) -> list[str]:
    parts = [_head(run)]
    if "legs" not in run.result:  # a graph trainer's own figures
        body = "".join(_line(row.name, row.with_) for row in figures(run.result))
        plain = f"<table id='figures'>{body}</table>"
        return [*parts, plain, *_epochs(run), _details(run)]
    parts.append(_table(run.result))
    if told := run.result.get("step_explained"):
        parts.append(f"<pre id='step'>{escaped(told)}</pre>")
    if run.memory:
        parts.append(_memory(run))
    if run.metrics:
        parts += [_losses([run]), _steps(run), _phases(run), _waiting(run)]
    if run.trace:
        parts.append(_trace(run))
    if run.profile is not None:
        parts += [_frontier(run.profile, run.plan), _stalls(run)]
    explained = (run.result["legs"].get(WITH) or {}).get("explained")
    if explained:
        parts += ["<h3>In words</h3>", f"<pre>{escaped(explained)}</pre>"]
    return [*parts, _details(run)]


def _head(run: RunFiles) -> str:
    record, result = run.record, run.result
    versions = ", ".join(f"{k} {v}" for k, v in record.get("versions", {}).items())
    facts = {
        "command": " ".join(record.get("command", [])),
        "started": record.get("started", ABSENT),
        "status": record.get("status", ABSENT),
        "device": result.get("device", ABSENT),
        "ranks": result.get("num_ranks", ABSENT),
        "figures": steps_of(result) or ABSENT,
        "versions": versions or ABSENT,
        "git": _git(record.get("git")),
    }
    cells = "".join(
        f"<tr><th>{escaped(name)}</th><td>{escaped(value)}</td></tr>"
        for name, value in facts.items()
        if value != ABSENT
    )
    return f"<table>{cells}</table>"


def _git(state: Mapping[str, Any] | None) -> str:
    if not state:
        return "not a git checkout"
    return str(state["commit"])[:12] + (" with changes" if state["changed"] else "")


def _table(result: Mapping[str, Any]) -> str:
    verdict = result.get("verdict", {})
    kind = "good" if all(verdict.values()) else "bad"
    body = "".join(
        _line(name, without, with_, note=f"<td>{escaped(note)}</td>")
        for name, without, with_, note in result_rows(result)
    )
    head = f"<tr><th></th><th>{WITHOUT}</th><th>{WITH}</th><th></th></tr>"
    told = escaped(caption(result))
    summary = f"<p class='{kind}'>{told}</p>" if verdict else ""
    return f"<table id='figures'>{head}{body}</table>{summary}"


def _comparison(runs: Sequence[RunFiles]) -> str:
    """Return every run's `with` column side by side; a zero tells why it is one."""
    columns = [
        {row.name: _with_reason(row) for row in figures(run.result)} for run in runs
    ]
    names = list(dict.fromkeys(name for column in columns for name in column))
    head = "".join(f"<th>{escaped(run.name)}</th>" for run in runs)
    cells = {name: [each.get(name, ABSENT) for each in columns] for name in names}
    body = "".join(_line(name, *own) for name, own in cells.items())
    settings = f"<h3>Settings that differ</h3><pre>{escaped(_changed(runs))}</pre>"
    return f"<table id='compared'><tr><th></th>{head}</tr>{body}</table>{settings}"


def _line(name: str, *numbers: str, note: str = "") -> str:
    cells = "".join(f"<td class='number'>{escaped(number)}</td>" for number in numbers)
    return f"<tr><td>{escaped(name)}</td>{cells}{note}</tr>"


def _with_reason(row: TableRow) -> str:
    is_zero = row.note and row.with_ == bytes_text(0)
    return f"{row.with_} ({row.note})" if is_zero else row.with_


def _changed(runs: Sequence[RunFiles]) -> str:
    own = [set(run.config.splitlines()) for run in runs]
    shared = set.intersection(*own)
    lines = []
    for run in runs:
        lines.append(f"{run.name}:")
        lines += [line for line in run.config.splitlines() if line not in shared]
    return "\n".join(lines)


def _memory(run: RunFiles) -> str:
    picture = run.recorded
    where = f"step {picture.get('step', '?')} (the last), rank {picture.get('rank', 0)}"
    title = f"Memory over {where}: {run.result.get('peak_of', '')}"
    lines = memory_lines(run.memory, picture.get("peak_bytes", {}))
    return figure(title, lines, TIME, "MB")


def _losses(runs: Sequence[RunFiles]) -> str:
    several = len(runs) > 1
    lines = [
        Line(f"{run.name}, {leg}" if several else leg, points)
        for run in runs
        for leg, points in _by_leg(run, "loss").items()
        if not several or leg == WITH
    ]
    return figure("Loss by step", lines, "step", "loss", from_zero=False)


def _epochs(run: RunFiles) -> list[str]:
    """Return a graph trainer's losses and times, a line a seed."""
    return [
        figure("Loss by epoch", _by_seed(run, "loss"), "epoch", "loss"),
        figure("Time of each epoch", _by_seed(run, "epoch_ms"), "epoch", "ms"),
        figure("Time of each epoch", _by_seed(run, "seconds"), "epoch", "s"),
    ]


def _by_seed(run: RunFiles, key: str) -> list[Line]:
    found: dict[str, list[tuple[float, float]]] = {}
    for line in run.metrics:
        if "epoch" in line and isinstance(line.get(key), int | float):
            name = f"seed {line['seed']}" if "seed" in line else "training"
            found.setdefault(name, []).append((line["epoch"] + 1, line[key]))
    return [Line(name, points) for name, points in found.items()]


def _steps(run: RunFiles) -> str:
    lines = [Line(leg, points) for leg, points in _by_leg(run, "step_ms").items()]
    return figure("Time of each step, first rank", lines, "step", "ms")


def _waiting(run: RunFiles) -> str:
    """Return where the device waited, and what rebuilding took."""
    waits = {"stalled for a transfer": "stall_ms", "rebuilding": "recompute_ms"}
    lines = [
        Line(name, points)
        for name, key in waits.items()
        if (points := _by_leg(run, key).get(WITH))
    ]
    title = "Waiting and rebuilding in each step with ssdtrain, first rank"
    return figure(title, lines, "step", "ms") if lines else ""


def _trace(run: RunFiles) -> str:
    """Return the last recorded step of the first rank, in rows; with `plan="auto"` that
    is the observed one."""
    events = [e for e in run.trace if e.get("ph") == "X" and e["pid"] == 0]
    steps = [e for e in events if e["cat"] == "compute"]
    if not steps:
        return ""
    last = max(steps, key=lambda e: float(e["ts"]))
    start, end = last["ts"], last["ts"] + last["dur"]
    bars = [
        Bar(e["cat"], e["name"], (e["ts"] - start) / 1e3, e["dur"] / 1e3)
        for e in events
        if start <= e["ts"] <= end and e is not last
    ]
    bars.insert(0, Bar("compute", last["name"], 0.0, last["dur"] / 1e3))
    title = f"What ran when in {last['name']}, rank 0, with ssdtrain"
    present = [row for row in TRACE_ROWS if any(bar.row == row for bar in bars)]
    return time_line(title, present, bars)


def _frontier(profile: Profile, plan: Plan | None) -> str:
    """Return what each price would buy, by the planner's simulator; and the plan."""
    line = [(100 * p.overhead, p.peak_bytes / 1e6) for p in frontier(profile)]
    dots, keep_ms = [], ""
    if plan is not None and plan.prediction is not None:
        keep_ms = f", {plan.prediction.keep_ms:.1f} ms by this profile"
        taken, keep = point_of(plan.prediction), plan.prediction.keep_peak_bytes
        name, cost = f"this run's plan ({plan.policy})", 100 * taken.overhead
        dots = [
            Dot(name, cost, taken.peak_bytes / 1e6),
            Dot("everything kept", 0.0, keep / 1e6),
        ]
    return figure(
        "The frontier: least predicted peak for each price, rank 0",
        [Line("plans found by quick searches on this run's profile", line)],
        f"predicted overhead over keeping everything{keep_ms} (%)",
        "peak of saved tensors (MB)",
        dots=dots,
    )


def _phases(run: RunFiles) -> str:
    """Return which steps were observed, or searched for a plan."""
    phases = {
        line["step"] + 1: line.get("phase")
        for line in run.metrics
        if line.get("leg") == WITH
    }
    observed = [step for step, phase in sorted(phases.items()) if phase == OBSERVING]
    if not observed:
        return ""
    told = f"With ssdtrain, {_steps_text(observed)} observed"
    planned = [step + 1 for step in observed if phases.get(step + 1) == FOLLOWING]
    if planned and run.result.get("device") == "cpu":
        began = ", ".join(f"step {step}" for step in planned)
        told += f", and {began} began with the search for a plan (on a GPU that runs "
        told += "beside training)"
    return f"<p>{escaped(told)}: they take longer than the others.</p>"


def _steps_text(steps: Sequence[int]) -> str:
    """Write step numbers: `steps 1 to 2, 9 were`."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][-1] + 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    told = [f"{r[0]} to {r[-1]}" if len(r) > 1 else str(r[0]) for r in runs]
    return f"step {told[0]} was" if len(steps) == 1 else f"steps {', '.join(told)} were"


def _stalls(run: RunFiles) -> str:
    """Return where the device waits under the plan, by the plan and by measurement, and
    where each module's tensors rest."""
    profile, plan = run.profile, run.plan
    if profile is None or plan is None or plan.prediction is None:
        return ""
    waits = []
    for stall in plan.prediction.stalls[:NUM_STALLS]:
        item = profile.items_of(stall.lane)[stall.item]
        waits.append((item.name, item.module or ABSENT, f"{stall.ms:.2f} ms"))
    moved = []
    for row in module_rows(profile, plan):
        places = row.kept_bytes, row.host_bytes, row.ssd_bytes, row.recomputed_bytes
        moved.append((row.module, *(bytes_text(n) if n else ABSENT for n in places)))
    told = _grid(("tensor", "module", "waits"), waits)
    where = _grid(("module", "kept", "host memory", "SSD", "rebuilt"), moved)
    return (
        "<h3>Where the device waits, as predicted</h3>"
        f"{told if waits else '<p>Nowhere, by the plan.</p>'}"
        f"<p>{escaped(_measured_waits(run))}</p>"
        f"<details><summary>Where each module's tensors rest</summary>{where}</details>"
    )


def _measured_waits(run: RunFiles) -> str:
    """Return what the steps under the plan waited for transfers."""
    found = [
        line["stall_ms"]
        for line in run.metrics
        if line.get("leg") == WITH
        and line.get("phase") == FOLLOWING
        and isinstance(line.get("stall_ms"), int | float)
    ]
    if not found:
        return "No step under the plan was measured."
    least, most = min(found), max(found)
    span = f"{least:.2f} to {most:.2f} ms, {median(found):.2f} ms in the middle"
    count = f"{len(found)} step{'s' * (len(found) > 1)}"
    return f"Measured in the {count} that followed a plan: {span} (a step, first rank)."


def _grid(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    names = "".join(f"<th>{escaped(name)}</th>" for name in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escaped(cell)}</td>" for cell in line) + "</tr>"
        for line in lines
    )
    return f"<table><tr>{names}</tr>{body}</table>"


def _by_leg(run: RunFiles, key: str) -> dict[str, list[tuple[float, float]]]:
    """Return (step from 1, value) by leg; of a repeated step the last value."""
    found: dict[str, dict[int, float]] = {}
    for line in run.metrics:
        if "leg" in line and isinstance(line.get(key), int | float):
            found.setdefault(line["leg"], {})[line["step"] + 1] = line[key]
    return {leg: sorted(values.items()) for leg, values in found.items()}


def _details(run: RunFiles) -> str:
    config = f"<details><summary>config.yaml</summary><pre>{escaped(run.config)}</pre>"
    values = json.dumps(run.result, indent=1)
    result = f"<details><summary>result.json</summary><pre>{escaped(values)}</pre>"
    return f"{config}</details>{result}</details>"
