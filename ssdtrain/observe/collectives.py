"""How many collectives this process has begun.

A region whose second forward runs collectives waits there for the same region of other
ranks: they may run it again in the same steps only ([Note: one step for all] in
hosts/peers.py).
"""

from torch import distributed


def num_collectives() -> int | None:
    """Count those of all process groups so far; None where a backend does not count."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return 0
    try:
        # A number that torch compares when ranks hang; it has no public name.
        return sum(
            group._get_sequence_number_for_group()
            for group in distributed.distributed_c10d._world.pg_map
            if isinstance(group, distributed.ProcessGroup)
        )
    except RuntimeError:  # a backend of somebody else's
        return None
