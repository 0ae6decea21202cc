"""Trees as an array of parents."""

import torch


def flatten(parent: torch.Tensor) -> None:
    """Let every node point at its root, in place.

    Args:
        parent: int64, shape (num_nodes,): roots are their own parents.
    """
    while True:
        above = parent[parent]
        if torch.equal(above, parent):
            return
        parent.copy_(above)
