"""Gradient-boosted regression trees as data: read from JSON, evaluated in Python;
training (`fit.py`, scikit-learn) is elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass

from ssdtrain.errors import ConfigError


@dataclass(frozen=True)
class Tree:
    """Nodes in depth-first order: a split's left child is the next node."""

    features: tuple[int, ...]
    """Which feature a split looks at; -1 at a leaf."""
    values: tuple[float, ...]
    """Threshold of a split (at most it: left), or what a leaf adds."""
    rights: tuple[int, ...]
    """Index of a split's right child."""

    def __call__(self, row: Sequence[float]) -> float:
        """What this tree adds for a row of features."""
        node = 0
        while (feature := self.features[node]) >= 0:
            left = row[feature] <= self.values[node]
            node = node + 1 if left else self.rights[node]
        return self.values[node]


@dataclass(frozen=True, kw_only=True)
class Forest:
    """A sum of trees."""

    names: tuple[str, ...]
    """Of the features, in their order."""
    base: float
    trees: tuple[Tree, ...]

    def predict(self, row: Sequence[float]) -> float:
        """The sum for one row of features."""
        return self.base + sum(tree(row) for tree in self.trees)

    def check(self) -> None:
        """Make sure that every tree ends. Raises ConfigError: one does not, or looks at
        an unknown feature."""
        wrong = "kernel models: a tree"
        for tree in self.trees:
            size, rights = len(tree.features), tree.rights
            if not size or not size == len(tree.values) == len(rights):
                raise ConfigError(f"{wrong}'s three lists differ in length")
            for node, feature in enumerate(tree.features):
                if feature >= len(self.names):
                    raise ConfigError(f"{wrong} looks at feature {feature}")
                if feature >= 0 and not node < rights[node] < size:
                    raise ConfigError(f"{wrong}'s node {node} leads nowhere")
