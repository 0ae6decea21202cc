"""What a `Binding` learns of one saved tensor, and what its row must tell for others.

See [Note: compiled plan] in table.py.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from ssdtrain.cache.sizes import TensorMetadata
from ssdtrain.rebuild.compiled import Compiled


@dataclass(kw_only=True)
class Spec:
    """What one call of `pack` turned out to be in the lane that was watched."""

    num_bytes: int
    """Of the tensor as it was saved, a view perhaps."""
    parameter: nn.Parameter | None = None
    is_whole: bool = True
    """Whether it is the parameter itself, and not a view of it."""
    item: int = -1
    """-1: not an item of the plan."""
    is_first: bool = False
    """Whether it is the item's first handle."""
    is_plain: bool = True
    """False: only the general path, or a recipe, can tell."""
    is_held: bool = False
    """Whether it stays, and its owner holds it anyway."""
    is_rebuilt: bool = False
    """Whether a recipe made it again."""
    compiled: Compiled | None = None
    """That recipe, where it can be asked for again; of the first handle alone."""
    copy: "Spec | None" = None
    """What that recipe stores: an item of its own."""
    is_wrapped: bool = False
    """Whether all this is said of the part of a wrapper."""
    is_remade: bool = False
    """Whether its region's forward makes it again."""
    is_placed: bool = False
    """Whether it has a place in its region, and is stored."""
    region: int = -1
    """The region call in whose forward it is saved."""
    index: int = -1
    """Of the tensors that a re-run of that call saves; -1: it does not."""
    serves: int = -1
    """The region call that stores it as its input."""
    is_dense: bool = False
    """Whether it fills its record without gaps, in the record's first dtype."""
    is_view: bool = False
    """Whether it is a view of what an operator made."""
    by_norm: bool = False
    """Whether a normalization saved it whose epsilon is known: recipes may read it."""
    marks: int = 0
    """By how many its pack moved the cursor on."""
    acts_at_pack: bool = False
    """Whether something was released when it was packed."""
    acts_at_use: bool = False
    """Whether something was released or loaded when it was used."""
    last_use: int = -1
    """Number of its last use in backward."""
    extent_bytes: int = 0
    """Of its record: the tensor may be a view inside."""
    look: TensorMetadata | None = None
    """What a tensor of another size must be like."""

    @property
    def is_loud(self) -> bool:
        """Whether the plan does something when it is packed or used."""
        return self.acts_at_pack or self.acts_at_use


class QuietCounts(NamedTuple):
    """What quiet rows, packed or used since the last one that counts, have not."""

    marks: int = 0
    num_bytes: int = 0
    uses: int = 0
    openers: tuple[int, ...] = ()
    """Rows that opened the items of which these bytes are."""


NOTHING = QuietCounts()
