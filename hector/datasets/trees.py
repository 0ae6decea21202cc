"""Generated trees: boolean expressions, whose parts are labelled with their values.

A layer that goes up trees level by level can learn them exactly (Wang, section 4.4.3);
one that looks a few hops far cannot.
"""

import torch
from torch.nn.functional import one_hot

from hector.datasets.task import NodeClassification
from hector.graph import HeteroGraph

EXPRESSIONS = "expressions"
_TOKENS = 5  # false, true, and, or, xor
_LEAVES = 8


def expressions(num_trees: int, *, seed: int = 0) -> NodeClassification:
    """A forest of `num_trees` trees of eight leaves each, edges from children up.

    Features are the tokens, one-hot; labels the values of inner nodes. Four fifths of
    the trees are trained on.
    """
    if num_trees < 2:
        raise ValueError(f"expected at least 2 trees, got {num_trees}: raise the scale")
    gen = torch.Generator().manual_seed(seed)
    size = 2 * _LEAVES - 1
    src, dst, tokens, values = [], [], [], []
    for tree in range(num_trees):
        first = tree * size
        kinds = torch.randint(3, (size,), generator=gen, device="cpu").tolist()
        bits = torch.randint(2, (_LEAVES,), generator=gen, device="cpu").tolist()
        picks = torch.rand(_LEAVES, generator=gen, device="cpu").tolist()
        value, open_nodes = list(bits), list(range(_LEAVES))
        for new in range(_LEAVES, size):
            at = int(picks[new - _LEAVES] * (len(open_nodes) - 1))
            left, right = open_nodes[at : at + 2]
            src += [first + left, first + right]
            dst += [first + new] * 2
            a, b = value[left], value[right]
            value.append((a & b, a | b, a ^ b)[kinds[new]])
            open_nodes[at : at + 2] = [new]
        tokens += [*bits, *(2 + kind for kind in kinds[_LEAVES:])]
        values += value
    number = num_trees * size
    ids = torch.arange(number, device="cpu")
    inner = ids[ids % size >= _LEAVES]
    cut = min(max(1, num_trees * 4 // 5), num_trees - 1) * size
    labels = torch.tensor(values, device="cpu")
    train, test = inner[inner < cut], inner[inner >= cut]
    child, parent = (torch.tensor(side, device="cpu") for side in (src, dst))
    return NodeClassification(
        name=EXPRESSIONS,
        graph=HeteroGraph.from_arrays(
            child, parent, torch.zeros_like(child), num_nodes=number, num_edge_types=1
        ),
        num_classes=2,
        train_nodes=train,
        train_labels=labels[train],
        test_nodes=test,
        test_labels=labels[test],
        features=one_hot(torch.tensor(tokens, device="cpu"), _TOKENS).float(),
    )
