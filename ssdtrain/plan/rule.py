"""What becomes of a saved tensor that no order names.

[Note: a rule next to the orders]
Orders name releases and loads by marks, which takes an observed step. Before there is
one (the first steps, which must fit and may not wait for long), after a lane has left
its plan, and for what a recipe or a region stores outside of its order, a placement is
found with what is known at that moment. `plan="offload-all"`, which observes nothing,
is a rule alone. One executor carries out orders and rules.
(tests/ssdtrain/cache/test_executor.py)
"""

from dataclasses import dataclass

from ssdtrain.plan.placement import Placement


@dataclass(frozen=True)
class Rule:
    """Moves everything but the last tensors of a lane whose backward follows.

    Backward asks for those at once: moving them would only send them to the target
    and straight back (Wu 5.3.2, mark 4 of Figure 5.5).
    """

    placement: Placement = Placement.OFFLOAD
    """KEEP, OFFLOAD or OFFLOAD_IF_IN_TIME."""
    spares_held: bool = False
    """Whether what its owner holds anyway stays, as in every plan."""
    rebuilds: bool = True
    """Whether a recipe may take a record's place."""

    def place(self, left_bytes: int, tail_bytes: int, *, held: bool) -> Placement:
        """Return the placement of a record.

        Args:
            left_bytes: expected after it, before backward asks for the lane's last
                ones; negative: nobody knows.
            tail_bytes: that a release window could never get rid of before backward.
            held: its owner holds it until the end of backward: moving it frees nothing.
        """
        if self.placement is Placement.KEEP or (held and self.spares_held):
            return Placement.KEEP
        if 0 <= left_bytes < tail_bytes:
            return Placement.KEEP_LAST
        return self.placement


KEEP_ALL = Rule(Placement.KEEP)
