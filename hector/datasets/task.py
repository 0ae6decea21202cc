"""Node classification: a graph with labels on some of its nodes."""

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hector.datasets.generate import GraphSpec, generate
from hector.graph import HeteroGraph
from hector.indexing import check_range, integers


@dataclass(frozen=True, kw_only=True, eq=False)
class NodeClassification:
    """A graph with labels on some of its nodes.

    Raises ValueError for nodes and labels that do not fit the graph or one another, and
    for a training node that is there twice.
    """

    name: str
    graph: HeteroGraph
    num_classes: int
    train_nodes: Tensor
    """int64 [num_train]."""
    train_labels: Tensor
    """int64 [num_train] in [0, num_classes)."""
    test_nodes: Tensor
    """int64 [num_test]."""
    test_labels: Tensor
    """int64 [num_test] in [0, num_classes)."""
    features: Tensor | None = None
    """[num_nodes, width]: rows that are the data set's own."""

    def __post_init__(self) -> None:
        for part in ("train", "test"):
            nodes = getattr(self, f"{part}_nodes")
            labels = getattr(self, f"{part}_labels")
            integers(f"{part}_nodes", nodes)
            integers(f"{part}_labels", labels)
            if nodes.shape != labels.shape:
                raise ValueError(
                    f"expected a label for each of {nodes.numel()} {part}_nodes, got "
                    f"{labels.numel()}"
                )
            check_range(f"{part}_nodes", nodes, self.graph.num_nodes, "num_nodes")
            check_range(f"{part}_labels", labels, self.num_classes, "num_classes")
        num, distinct = self.train_nodes.numel(), self.train_nodes.unique().numel()
        if not 0 < distinct == num:
            raise ValueError(
                f"expected distinct train_nodes, at least one, got {num} of {distinct} "
                f"nodes"
            )

    def facts(self) -> dict[str, Any]:
        """Name, sizes and a digest of edges and labels, as plain JSON values."""
        digest = hashlib.blake2b(digest_size=16)
        graph = self.graph
        edges = (graph.src, graph.dst, graph.edge_type)
        labelled = (self.train_nodes, self.train_labels)
        tested = (self.test_nodes, self.test_labels)
        for part in (*edges, *labelled, *tested):
            digest.update(f"{part.numel()} ".encode())
            digest.update(part.cpu().numpy().tobytes())
        return {
            "name": self.name,
            "num_nodes": graph.num_nodes,
            "num_edges": graph.num_edges,
            "num_classes": self.num_classes,
            "digest": digest.hexdigest(),
        }

    def to(self, device: torch.device | str) -> "NodeClassification":
        return NodeClassification(
            name=self.name,
            graph=self.graph.to(device),
            num_classes=self.num_classes,
            train_nodes=self.train_nodes.to(device),
            train_labels=self.train_labels.to(device),
            test_nodes=self.test_nodes.to(device),
            test_labels=self.test_labels.to(device),
            features=None if self.features is None else self.features.to(device),
        )


def generated_task(
    spec: GraphSpec,
    *,
    num_classes: int,
    num_labelled: int,
    train_share: float = 0.8,
    seed: int = 0,
) -> NodeClassification:
    """A generated graph whose labels can be learnt from its relations.

    A hidden table gives every relation a score a class; a node's label is the class
    with the largest sum over its in-edges. The labelled nodes are drawn among those
    with in-edges.
    """
    return labelled_task(
        "generated",
        generate(spec, seed=seed),
        num_classes=num_classes,
        num_labelled=num_labelled,
        train_share=train_share,
        seed=seed,
    )


def labelled_task(
    name: str,
    graph: HeteroGraph,
    *,
    num_classes: int,
    num_labelled: int,
    train_share: float = 0.8,
    seed: int = 0,
) -> NodeClassification:
    """A graph with the labels that `generated_task` says."""
    if num_classes < 2 or not 0 < train_share < 1:
        raise ValueError(
            "expected num_classes >= 2 and train_share in (0, 1), got "
            f"{num_classes} and {train_share}"
        )
    gen = torch.Generator().manual_seed(seed + 1)
    table = torch.randn(graph.num_edge_types, num_classes, generator=gen, device="cpu")
    scores = torch.zeros(graph.num_nodes, num_classes, device="cpu")
    scores.index_add_(0, graph.dst, table[graph.edge_type])
    reached = (graph.csc().ptr.diff() > 0).nonzero().flatten()
    if not 2 <= num_labelled <= reached.numel():
        raise ValueError(
            f"expected num_labelled in [2, {reached.numel()}] (nodes with in-edges), "
            f"got {num_labelled}; set data.num_labelled, or a larger data.scale"
        )
    nodes = reached[
        torch.randperm(reached.numel(), generator=gen, device="cpu")[:num_labelled]
    ]
    labels = scores[nodes].argmax(1)
    cut = min(max(1, round(train_share * num_labelled)), num_labelled - 1)
    return NodeClassification(
        name=name,
        graph=graph,
        num_classes=num_classes,
        train_nodes=nodes[:cut],
        train_labels=labels[:cut],
        test_nodes=nodes[cut:],
        test_labels=labels[cut:],
    )
