"""Draws docs/img/one-activation.svg: where one saved tensor is during a step.

python docs/img/one_activation.py
"""

from pathlib import Path

import matplotlib
from matplotlib import pyplot
from matplotlib.axes import Axes

INK, QUIET = "#24292f", "#8c959f"
OURS, OTHERS = "#0969da", "#d0d7de"
ROWS = ("GPU computes", "GPU memory", "host link", "host memory", "SSD")
# Bars: row, start, end, label, whether this is the tensor that is followed.
BARS = (
    (0, 0, 2, "layer 1", True),
    (0, 2, 4, "layer 2", False),
    (0, 4, 6, "layer 3", False),
    (0, 6, 10, "layer 3", False),
    (0, 10, 14, "layer 2", False),
    (0, 14, 18, "layer 1", True),
    (1, 1, 4, "alive", True),
    (1, 12.6, 16, "alive", True),
    (2, 2, 3.4, "out", True),
    (2, 4, 5.4, "", False),
    (2, 8.4, 9.8, "", False),
    (2, 12.6, 14, "in", True),
    (3, 2, 6.6, "staging buffer", True),
    (3, 9.2, 14, "staging buffer", True),
    (4, 3.4, 6.6, "write", True),
    (4, 9.2, 12, "read", True),
)
STEPS = (
    (1, 1.0, "1 pack"),
    (2, 2.0, "2"),
    (1, 4.0, "3 release"),
    (4, 3.4, "4"),
    (4, 9.2, "5 prefetch"),
    (2, 12.6, "6"),
    (1, 14.0, "7 unpack"),
)
HEIGHT = 0.56


def draw(axes: Axes) -> None:
    """All bars, the numbers of the text, and the two halves of the step."""
    for row, start, end, label, ours in BARS:
        axes.barh(
            -row, end - start, HEIGHT, left=start, color=OURS if ours else OTHERS, lw=0
        )
        axes.barh(-row, end - start, HEIGHT, left=start, color="none", ec="white", lw=1)
        colour = "white" if ours else INK
        middle = (start + end) / 2
        axes.text(middle, -row, label, ha="center", va="center", color=colour, size=9)
    for row, when, label in STEPS:
        axes.plot([when, when], [-row + 0.28, -row + 0.42], color=INK, lw=1)
        axes.text(when, -row + 0.44, label, ha="left", va="bottom", color=INK, size=9)
    for left, right, label in ((0, 6, "forward"), (6, 18, "backward")):
        axes.annotate(
            "",
            (left, 0.95),
            (right, 0.95),
            arrowprops={"arrowstyle": "<->", "color": QUIET, "lw": 1},
        )
        axes.text((left + right) / 2, 1.0, label, ha="center", color=QUIET, size=10)


def main() -> None:
    """Write the picture beside this file."""
    pyplot.switch_backend("svg")
    matplotlib.rcParams["svg.hashsalt"] = "ssdtrain"
    figure, axes = pyplot.subplots(figsize=(9, 3.6), layout="constrained")
    draw(axes)
    axes.set_yticks([-row for row in range(len(ROWS))], ROWS, color=INK)
    axes.set_xticks([])
    axes.set_xlim(-0.2, 18.2)
    axes.set_ylim(-len(ROWS) + 0.55, 1.35)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    figure.patch.set_facecolor("white")
    path = Path(__file__).with_name("one-activation.svg")
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
