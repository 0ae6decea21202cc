"""Pictures drawn by matplotlib; in a page SVG with its text as text, no script."""

import html
import io
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ssdtrain.quantities import bytes_text

SIZE = (7.9, 3.4)
"""Of a picture, in inches."""
ROW = 0.27
"""Height of a row of a time line, in inches."""
MOST_BARS = 1500
"""Of a row: the longest are drawn."""
TIME = "time since the step began (ms)"
Course = Sequence[tuple[float, float]]
"""(milliseconds since the step began, bytes) in order of time."""


class Line(NamedTuple):
    """One line of a picture."""

    name: str
    points: Sequence[tuple[float, float]]
    level: float | None = None
    """A dotted line across, the exact peak, of points that hold until the next one."""


class Dot(NamedTuple):
    """A point with a name."""

    name: str
    x: float
    y: float


class Bar(NamedTuple):
    """An interval on a row of a time line, in ms."""

    row: str
    name: str
    start: float
    duration: float


def escaped(value: object) -> str:
    """Return text for a page."""
    return html.escape(str(value))


def figure(
    title: str,
    lines: Sequence[Line],
    x_name: str,
    y_name: str,
    *,
    from_zero: bool = True,
    dots: Sequence[Dot] = (),
) -> str:
    """Draw lines to scale; the vertical axis starts at 0 unless told otherwise."""
    if not dots and not any(line.points for line in lines):
        return ""

    def draw(axes: Any) -> None:
        _draw(axes, lines, x_name, y_name, from_zero=from_zero, dots=dots)

    return _drawing(title, SIZE, draw)


def time_line(title: str, rows: Sequence[str], bars: Sequence[Bar]) -> str:
    """Draw rows of intervals over one axis of time; a bar's tooltip has the name."""
    if not bars:
        return ""
    told: dict[str, str] = {}

    def draw(axes: Any) -> None:
        for number, row in enumerate(rows):
            own = sorted((b for b in bars if b.row == row), key=lambda b: -b.duration)
            for bar in own[:MOST_BARS]:
                [patch] = axes.barh(
                    number, bar.duration, 0.8, bar.start, color=f"C{number}", alpha=0.5
                )
                patch.set_gid(f"bar-{len(told)}")
                told[patch.get_gid()] = f"{bar.name}, {bar.duration:.2f} ms"
        axes.set_yticks(range(len(rows)), rows)
        axes.invert_yaxis()
        axes.set_xlabel(TIME)

    text = _drawing(title, (SIZE[0], 0.8 + ROW * len(rows)), draw)
    return re.sub(
        r'<g id="(bar-\d+)">',
        lambda found: f"{found[0]}<title>{escaped(told[found[1]])}</title>",
        text,
    )


def memory_lines(
    courses: Mapping[str, Course], peaks: Mapping[str, float]
) -> list[Line]:
    """Return memory over a step in MB, a line a run; `peaks`: exact ones in bytes."""
    found = []
    for name, course in courses.items():
        peak = peaks.get(name, max((size for _, size in course), default=0.0))
        points = [(ms, size / 1e6) for ms, size in course]
        found.append(Line(f"{name}, peak {bytes_text(peak)}", points, peak / 1e6))
    return found


def write_memory(
    courses: Mapping[str, Course],
    peaks: Mapping[str, float],
    what: str,
    path: Path,
    title: str,
) -> None:
    """Draw memory over a step (Figure 5.8) into a PNG, or whatever `path` ends in.
    Raises ImportError: matplotlib is not installed."""
    picture, axes = _figure((8, 4))
    _draw(axes, memory_lines(courses, peaks), TIME, f"{what} (MB)")
    picture.suptitle(title)
    picture.savefig(path, dpi=120)


def write_cloud(
    groups: Mapping[str, Sequence[tuple[float, float]]],
    front: Line,
    limit: float,
    path: Path,
    *,
    title: str,
    x_name: str,
    y_name: str,
) -> None:
    """Draw points, the line of the best of them, and a limit of the horizontal axis,
    into a PNG, or whatever `path` ends in. Raises ImportError: matplotlib is not
    installed."""
    picture, axes = _figure((8, 4.5))
    for name, points in groups.items():
        axes.plot(*_columns(points), ".", label=name, alpha=0.5)
    axes.plot(*_columns(front.points), color="black", label=front.name)
    axes.axvline(limit, color="black", linestyle=":", linewidth=1)
    axes.set_xlabel(x_name)
    axes.set_ylabel(y_name)
    axes.legend(loc="upper right")
    picture.suptitle(title)
    picture.savefig(path, dpi=120)


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _draw(
    axes: Any,
    lines: Sequence[Line],
    x_name: str,
    y_name: str,
    *,
    from_zero: bool = True,
    dots: Sequence[Dot] = (),
) -> None:
    for number, line in enumerate(lines):
        xs, ys = _columns(line.points)
        style = "default" if line.level is None else "steps-post"
        axes.plot(xs, ys, color=f"C{number}", label=line.name, drawstyle=style)
        if line.level is not None:
            axes.axhline(line.level, color=f"C{number}", linestyle=":", linewidth=1)
    for number, dot in enumerate(dots, len(lines)):
        axes.plot([dot.x], [dot.y], "o", color=f"C{number}", label=dot.name)
    axes.set_xlabel(x_name)
    axes.set_ylabel(y_name, wrap=True)
    if from_zero:
        axes.set_ylim(bottom=0)
    # Above the axes: looking for the best place takes seconds with many points.
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), frameon=False)


def _figure(size: tuple[float, float]) -> tuple[Any, Any]:
    # The object interface: pyplot would choose a display and keep global state.
    from matplotlib.figure import Figure

    made = Figure(figsize=size, layout="constrained")
    return made, made.add_subplot()


def _drawing(title: str, size: tuple[float, float], draw: Callable[[Any], None]) -> str:
    from matplotlib import rc_context

    out = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        picture, axes = _figure(size)
        draw(axes)
        picture.savefig(out, format="svg", transparent=True)
    name = escaped(title)
    svg = re.sub(r"<metadata>.*?</metadata>", "", out.getvalue(), flags=re.S)
    svg = svg.partition("<svg")[2]
    return f"<h3>{name}</h3><svg role='img' aria-label='{name}'{svg}"
