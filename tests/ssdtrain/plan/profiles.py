"""Profiles made by hand: blocks of saved tensors with known times."""

import random
from dataclasses import replace

from ssdtrain.curves import Curve, Links
from ssdtrain.plan.profile import Item, Mark, Phase, Profile

MB = 1_000_000


def curve(gb_per_s: float) -> Curve:
    """A link without a start-up time."""
    return Curve.straight(0.0, gb_per_s * 1e9)


def links(gb_per_s: float, **more: object) -> Links:
    """Equal links in both directions."""
    both = curve(gb_per_s)
    return Links(d2h=both, h2d=both, **more)  # type: ignore[arg-type]


def chain(
    num: int, *, gb_per_s: float = 10.0, forward_ms: float = 1.0, num_bytes: int = MB
) -> Profile:
    """One lane: `num` equal items, packed in order, used in reverse.

    Backward takes twice the time of forward; the optimizer 3 ms.
    """
    items = tuple(
        Item(name=f"op{n} [1]", num_bytes=num_bytes, module=f"blocks.{n // 2}")
        for n in range(num)
    )
    forward = [
        Mark(lane=0, phase=Phase.FORWARD, item=n, ms=forward_ms) for n in range(num)
    ]
    backward = [
        Mark(lane=0, phase=Phase.BACKWARD, item=n, ms=2 * forward_ms)
        for n in reversed(range(num))
    ]
    return Profile(
        lanes=("model/0",),
        kinds={"model/0": items},
        marks=(*forward, *backward),
        links=links(gb_per_s),
        tail_ms=3.0,
    )


def drawn(seed: int, num: int, num_lanes: int = 1) -> Profile:
    """A random profile: sizes, times, recipes on earlier items, temporaries."""
    draw = random.Random(seed)
    items = []
    for n in range(num):
        rebuilt = n > 0 and draw.random() < 0.4
        items.append(
            Item(
                name=f"op{n} [1]",
                num_bytes=draw.randint(1, 8) * MB,
                recipe="gelu" if rebuilt else None,
                recipe_ms=draw.uniform(0.05, 0.4) if rebuilt else 0.0,
                inputs=(draw.randrange(n),) if rebuilt else (),
            )
        )
    marks: list[Mark] = []
    for lane in range(num_lanes):
        for n in range(num):
            ms = draw.uniform(0.1, 1.0)
            marks.append(Mark(lane=lane, phase=Phase.FORWARD, item=n, ms=ms))
        for n in reversed(range(num)):
            marks.append(
                Mark(
                    lane=lane,
                    phase=Phase.BACKWARD,
                    item=n,
                    ms=draw.uniform(0.2, 2.0),
                    other_bytes=draw.randint(0, 6) * MB,
                )
            )
    return Profile(
        lanes=("model/0",) * num_lanes,
        kinds={"model/0": tuple(items)},
        marks=tuple(marks),
        links=links(draw.uniform(4.0, 20.0)),
        tail_ms=1.0,
    )


def with_links(profile: Profile, gb_per_s: float) -> Profile:
    """The same step on a machine with other links."""
    return replace(profile, links=links(gb_per_s))
