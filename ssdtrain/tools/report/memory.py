"""Memory over one step, with and without ssdtrain (Figure 5.8)."""

from collections.abc import Mapping, Sequence
from pathlib import Path

Course = Sequence[tuple[float, float]]
"""(milliseconds since the step began, bytes) in order of time."""

_BYTES_PER_MB = 1e6


def peak_bytes(course: Course) -> float:
    """Return the highest point of a course; 0 for an empty one."""
    return max((num_bytes for _, num_bytes in course), default=0.0)


def draw(
    courses: Mapping[str, Course],
    what: str,
    path: Path,
    *,
    title: str = "",
    peaks: Mapping[str, float] | None = None,
) -> None:
    """Draw one line a run into a PNG (or whatever `path` ends in).

    Args:
        courses: the course of each run, by its name.
        what: what the bytes are, for the axis.
        path: where the picture goes.
        title: which step, which rank.
        peaks: the exact peak of each run; a course that was sampled may miss it.

    Raises:
        ImportError: matplotlib is not installed.
    """
    # The object interface: pyplot would choose a display and keep global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    for number, (name, course) in enumerate(courses.items()):
        peak = peak_bytes(course) if peaks is None else peaks[name]
        label = f"{name}, peak {peak / _BYTES_PER_MB:.2f} MB"
        times = [time_ms for time_ms, _ in course]
        megabytes = [num_bytes / _BYTES_PER_MB for _, num_bytes in course]
        colour = f"C{number}"
        axes.step(times, megabytes, where="post", label=label, color=colour)
        axes.axhline(peak / _BYTES_PER_MB, color=colour, linestyle=":", linewidth=1)
    axes.set_xlabel("time since the step began (ms)")
    axes.set_ylabel(f"{what} (MB)", wrap=True)
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.legend()
    figure.savefig(path, dpi=120)
