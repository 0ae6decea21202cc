"""Pictures of a page as SVG: lines over round axes, and rows of a time line.

Drawn by hand, so that a page holds no script and fetches nothing.
"""

import html
import math
from collections.abc import Sequence
from typing import NamedTuple

COLOURS = ("#777777", "#1f77b4", "#d62728", "#2ca02c")
ROW = 26
"""Height of a row of a time line."""
WIDTH, HEIGHT = 760, 260
LEFT, RIGHT, BOTTOM = 70, 20, 45
LEGEND = 18
"""Height of a line of the legend, which stands above the axes."""
NUM_TICKS = 5
"""About so many marks on an axis, at round numbers."""
MAX_POINTS = 1500
"""Of a line; a course is thinned to its highest points between two marks."""


class Line(NamedTuple):
    """One line of a picture."""

    name: str
    points: Sequence[tuple[float, float]]
    level: float | None = None
    """A dotted line across: the exact peak."""


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
    points = [point for line in lines for point in line.points]
    points += [(dot.x, dot.y) for dot in dots]
    if not points:
        return ""
    levels = [line.level for line in lines if line.level is not None]
    values = [*(y for _, y in points), *levels]
    top = 24 + LEGEND * (len(lines) + len(dots))
    frame = Frame(
        round_marks([x for x, _ in points]),
        round_marks([0.0, *values] if from_zero else values),
        top,
    )
    drawn = [axes(frame, x_name, y_name)]
    for number, line in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(frame.at(x, y) for x, y in thinned(line.points))
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
            f"font-size='12'>\u2014 {escaped(line.name)}</text>"
        )
    for number, dot in enumerate(dots, len(lines)):
        colour = COLOURS[number % len(COLOURS)]
        x, y = frame.at(dot.x, dot.y).split(",")
        drawn.append(
            f"<circle cx='{x}' cy='{y}' r='4' fill='{colour}'/>"
            f"<text x='{LEFT}' y='{12 + LEGEND * number}' fill='{colour}' "
            f"font-size='12'>\u25cf {escaped(dot.name)}</text>"
        )
    return _drawing(title, top + HEIGHT, drawn)


def time_line(title: str, rows: Sequence[str], bars: Sequence[Bar]) -> str:
    """Draw rows of intervals over one axis of time; a bar's tooltip has the name."""
    if not bars:
        return ""
    end = max(bar.start + bar.duration for bar in bars)
    marks = round_marks([0.0, end])
    bottom = 10 + ROW * len(rows)
    frame = Frame(marks, (0.0, 1.0), 10)
    drawn = []
    for number, row in enumerate(rows):
        y, colour = 10 + ROW * number, COLOURS[1 + number % (len(COLOURS) - 1)]
        drawn.append(
            f"<text x='{LEFT - 6}' y='{y + ROW / 2 + 4:.0f}' text-anchor='end' "
            f"font-size='12'>{escaped(row)}</text>"
        )
        own = [bar for bar in bars if bar.row == row]
        for bar in sorted(own, key=lambda bar: -bar.duration)[:MAX_POINTS]:
            left = frame.across(bar.start)
            width = max(0.5, frame.across(bar.start + bar.duration) - left)
            drawn.append(
                f"<rect x='{left:.1f}' y='{y + 3}' width='{width:.1f}' "
                f"height='{ROW - 6}' fill='{colour}' fill-opacity='0.5'>"
                f"<title>{escaped(bar.name)}, {bar.duration:.2f} ms</title></rect>"
            )
    for mark in marks:
        x = frame.across(mark)
        drawn.append(
            f"<line x1='{x:.1f}' x2='{x:.1f}' y1='10' y2='{bottom}' stroke='#ddd'/>"
            f"<text x='{x:.1f}' y='{bottom + 16}' text-anchor='middle' font-size='11'>"
            f"{mark:.6g}</text>"
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    drawn.append(
        f"<text x='{middle}' y='{bottom + 36}' text-anchor='middle' font-size='12'>"
        "time since the step began (ms)</text>"
    )
    return _drawing(title, bottom + BOTTOM, drawn)


def _drawing(title: str, height: int, drawn: Sequence[str]) -> str:
    box = f"viewBox='0 0 {WIDTH} {height}' width='{WIDTH}' height='{height}'"
    svg = f"<svg {box} role='img' aria-label='{escaped(title)}'>{''.join(drawn)}</svg>"
    return f"<h3>{escaped(title)}</h3>{svg}"


def round_marks(values: Sequence[float]) -> list[float]:
    """Return round numbers from at most the least value to at least the largest."""
    low, high = min(values), max(values)
    if high <= low:
        low, high = low - 0.5, high + 0.5
    rough = (high - low) / NUM_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * n for n in (1, 2, 5, 10) if power * n >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [index * step for index in range(first, last + 1)]


class Frame(NamedTuple):
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


def axes(frame: Frame, x_name: str, y_name: str) -> str:
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
        f"font-size='12'>{escaped(x_name)}</text>"
        f"<text x='14' y='{centre}' font-size='12' text-anchor='middle' "
        f"transform='rotate(-90 14 {centre})'>{escaped(y_name)}</text>"
    )
    return "".join(parts)


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most `MAX_POINTS` points: of each stretch the highest, so no peak is
    lost."""
    if len(points) <= MAX_POINTS:
        return list(points)
    stretch = -(-len(points) // MAX_POINTS)
    starts = range(0, len(points), stretch)
    return [max(points[at : at + stretch], key=lambda p: p[1]) for at in starts]
