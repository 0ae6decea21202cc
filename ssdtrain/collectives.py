"""How many collectives this process has begun.

A region whose second forward runs collectives waits there for the same region of other
ranks: they may run it again in the same steps only ([Note: one step for all] in
engines/peers.py).
"""

from collections.abc import Iterable
from typing import Any

from torch import distributed


def num_collectives() -> int | None:
    """Count those of all groups of several ranks so far; None where a backend does not
    count."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return 0
    groups: Iterable[Any] = distributed.distributed_c10d._world.pg_map
    # A number that torch compares when ranks hang; it has no public name.
    own: list[Any] = [
        each for each in groups if isinstance(each, distributed.ProcessGroup)
    ]
    try:
        numbers: list[int] = [
            each._get_sequence_number_for_group() for each in own if each.size() > 1
        ]
    except (AttributeError, RuntimeError):  # a backend of somebody else's
        return None
    return sum(numbers)
