"""Every plan of a small step, to compare the search with."""

import itertools
from collections.abc import Iterator

from ssdtrain.plan.baselines import WINDOW_LARGEST, largest_bytes
from ssdtrain.plan.choose import options
from ssdtrain.plan.placement import Placement, Placements
from ssdtrain.plan.schedule import Late, Style
from ssdtrain.plan.timeline import Timeline


def styles(timeline: Timeline) -> tuple[Style, ...]:
    """Return how strictly memory is freed: never wait, or a window of two largest."""
    window = WINDOW_LARGEST * largest_bytes(timeline)
    return (
        Style(),
        Style(late=Late.WAIT),
        Style(window_bytes=window),
        Style(window_bytes=window, late=Late.WAIT),
        Style(window_bytes=window // 2, late=Late.WAIT),
    )


def assignments(timeline: Timeline) -> Iterator[Placements]:
    """Return every combination of placements."""
    kinds = timeline.profile.kinds
    slots = [(kind, item) for kind, items in kinds.items() for item in items]
    for combination in itertools.product(*(options(timeline, i) for _, i in slots)):
        placements: dict[str, list[Placement]] = {kind: [] for kind in kinds}
        for (kind, _), placement in zip(slots, combination, strict=True):
            placements[kind].append(placement)
        yield placements
