"""Memory over one step, with and without ssdtrain (Figure 5.8)."""

from collections.abc import Mapping, Sequence
from pathlib import Path

Course = Sequence[tuple[float, float]]
"""(milliseconds since the step began, bytes) in order of time."""

_BYTES_PER_MB = 1e6


def peak_bytes(course: Course) -> float:
    """The highest point of a course; 0 for an empty one."""
    return max((num_bytes for _, num_bytes in course), default=0.0)


def draw(courses: Mapping[str, Course], what: str, path: Path) -> None:
    """Draw one line a run into a PNG (or whatever `path` ends in).

    Args:
        courses: the course of each run, by its name.
        what: what the bytes are, for the axis.
        path: where the picture goes.

    Raises:
        ImportError: matplotlib is not installed.
    """
    # The object interface: pyplot would choose a display and keep global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    for name, course in courses.items():
        label = f"{name}, peak {peak_bytes(course) / _BYTES_PER_MB:.1f} MB"
        times = [time_ms for time_ms, _ in course]
        megabytes = [num_bytes / _BYTES_PER_MB for _, num_bytes in course]
        axes.step(times, megabytes, where="post", label=label)
    axes.set_xlabel("time in the step (ms)")
    axes.set_ylabel(f"{what} (MB)")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=120)
