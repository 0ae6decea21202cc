"""Links as `ssdtrain doctor` would have measured them."""

from collections.abc import Iterable

from ssdtrain.tools.machine.fit import fit_curve
from ssdtrain.tools.machine.links import Link, LinkKind, Sample


def link(
    kind: LinkKind, gb_per_s: float, sizes: Iterable[int], start_s: float = 1e-6
) -> Link:
    """A pinned link of one rate (1e9 bytes) behind a start-up."""
    samples = tuple(
        Sample(size_bytes=size, seconds=start_s + size / (gb_per_s * 1e9))
        for size in sizes
    )
    return Link(
        kind=kind,
        source="a",
        target="b",
        depth=1,
        mode="pinned",
        samples=samples,
        curve=fit_curve(samples),
    )
