"""Node classification data sets: from files, and generated."""

import struct
import tokenize
import zipfile
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from pydirect.features import read_rows
from pydirect.memory import empty_table
from pydirect.ranks import Ranks
from pydirect.sampling import Graph, GraphStatistics, generate_graph

_FILL_ROWS = 1 << 17


@dataclass(frozen=True, kw_only=True)
class NodeDataset:
    """A graph whose nodes are to be classified."""

    name: str
    graph: Graph
    features: torch.Tensor
    """Floating point, shape (num_nodes, num_features), host memory."""

    labels: torch.Tensor
    """int64, shape (num_nodes,)."""

    num_classes: int
    train_nodes: torch.Tensor
    """int64, shape (num_train,)."""

    valid_nodes: torch.Tensor
    test_nodes: torch.Tensor

    def __post_init__(self) -> None:
        rows, nodes = self.features.shape[0], self.graph.num_nodes
        if rows != nodes or len(self.labels) != nodes:
            raise ValueError(
                f"{self.name}: expects a feature row and a label for each of {nodes} "
                f"nodes, got {rows} rows and {len(self.labels)} labels"
            )

    @property
    def num_features(self) -> int:
        return int(self.features.shape[1])


def planetoid(directory: str | Path, name: str = "cora") -> NodeDataset:
    """Cora or Citeseer with the public split, from one ``name.npz``.

    Args:
        directory: where ``name.npz`` lies, with arrays edge_index (both directions), y,
            train, val, test, and the binary features as x_indptr, x_indices, x_dim.
        name: file name without its suffix.

    Raises:
        ValueError: no such file, or no features in it.
    """
    path = Path(directory) / f"{name}.npz"
    if not path.is_file():
        raise ValueError(
            f"planetoid expects {path}: set trainer.dataset.directory to where "
            f"{name}.npz lies"
        )
    arrays = _arrays(path)
    labels = torch.from_numpy(arrays["y"].astype(np.int64))
    features = empty_table((len(labels), int(arrays["x_dim"])), torch.float32).zero_()
    counts = torch.from_numpy(np.diff(arrays["x_indptr"]).astype(np.int64))
    rows = torch.repeat_interleave(torch.arange(len(labels), device="cpu"), counts)
    columns = torch.from_numpy(arrays["x_indices"].astype(np.int64))
    features[rows, columns] = 1.0
    # Rows of bag-of-words features are normalised, as everywhere for Planetoid.
    features /= features.sum(1, keepdim=True).clamp(min=1)
    edges = torch.from_numpy(arrays["edge_index"].astype(np.int64))
    parts = {k: torch.from_numpy(arrays[k].astype(np.int64)) for k in _PARTS}
    return NodeDataset(
        name=name,
        graph=Graph.from_edges(edges, len(labels)),
        features=features,
        labels=labels,
        num_classes=int(labels.max()) + 1,
        train_nodes=parts["train"],
        valid_nodes=parts["val"],
        test_nodes=parts["test"],
    )


_PARTS = ("train", "val", "test")


def _arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a ``planetoid`` file, all there and within one another's sizes.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
        whole = {name: arrays[name].astype(np.int64) for name in _ARRAYS}
    except (OSError, *_UNREADABLE) as error:
        raise ValueError(
            f"planetoid expects arrays {', '.join(_ARRAYS)} in {path}, got "
            f"{type(error).__name__}: {error}"
        ) from error
    num_nodes, width = whole["y"].size, whole["x_dim"].max(initial=0)
    starts, columns = whole["x_indptr"], whole["x_indices"]
    below = {
        "edge_index": num_nodes,
        "x_indices": width,
        **dict.fromkeys(_PARTS, num_nodes),
    }
    right = [
        whole["edge_index"].ndim == 2 and len(whole["edge_index"]) == 2,
        whole["x_dim"].ndim == 0 and 0 < width <= _MOST_FEATURES,
        all(whole[name].ndim == 1 for name in _ARRAYS[1:] if name != "x_dim"),
        starts.size == num_nodes + 1 and bool((np.diff(starts) >= 0).all()),
        starts.size > 0 and starts[0] == 0 and starts[-1] == columns.size,
        all(
            not whole[name].size or 0 <= whole[name].min() <= whole[name].max() < limit
            for name, limit in below.items()
        ),
        num_nodes > 0 and 0 <= whole["y"].min() <= whole["y"].max() < _MOST_CLASSES,
    ]
    if not all(right):
        shapes = {name: list(array.shape) for name, array in whole.items()}
        raise ValueError(
            f"planetoid expects indices within the sizes of {path}, got {shapes}"
        )
    return arrays


_ARRAYS = ("edge_index", "y", "x_indptr", "x_indices", "x_dim", *_PARTS)
_UNREADABLE = (
    AttributeError,
    KeyError,
    ValueError,
    TypeError,
    EOFError,
    MemoryError,
    SyntaxError,
    NotImplementedError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
    tokenize.TokenError,
    struct.error,
)
_MOST_FEATURES, _MOST_CLASSES = 1 << 20, 1 << 20


def generated(
    statistics: GraphStatistics,
    *,
    name: str = "generated",
    seed: int = 0,
    device: str = "cpu",
    noise: float = 3.0,
) -> NodeDataset:
    """A generated graph with features that tell something about the class.

    A feature row is the centre of its class plus Gaussian noise: neighbours help,
    because they share the class more often than not.

    Args:
        statistics: sizes; the defaults are those of ogbn-products.
        seed: everything depends on it.
        device: where to draw; "cuda" makes large sets in seconds.
        noise: standard deviation of the noise; the centres have 1.
    """
    graph, labels = generate_graph(statistics, seed=seed, device=device)
    features = empty_table((graph.num_nodes, statistics.num_features), torch.float32)
    fill_features(features, labels, seed=seed, device=device, noise=noise)
    order = torch.randperm(
        graph.num_nodes, generator=torch.Generator().manual_seed(seed + 1), device="cpu"
    )
    num_train = max(1, round(statistics.train_share * graph.num_nodes))
    num_valid = max(1, num_train // 5)
    return NodeDataset(
        name=name,
        graph=graph,
        features=features,
        labels=labels,
        num_classes=statistics.num_classes,
        train_nodes=order[:num_train],
        valid_nodes=order[num_train : num_train + num_valid],
        test_nodes=order[num_train + num_valid : num_train + 2 * num_valid],
    )


def fill_features(
    features: torch.Tensor,
    labels: torch.Tensor,
    *,
    seed: int,
    device: str,
    noise: float,
) -> None:
    """Write class centre + noise into every row, a block of rows at a time."""
    generator = torch.Generator(device=device).manual_seed(seed)
    num_classes = int(labels.max()) + 1
    centres = torch.randn(
        num_classes,
        features.shape[1],
        generator=generator,
        device=device,
        dtype=torch.float32,
    )
    for start in range(0, len(labels), _FILL_ROWS):
        part = labels[start : start + _FILL_ROWS].to(device)
        rows = torch.randn(
            len(part),
            features.shape[1],
            generator=generator,
            device=device,
            dtype=torch.float32,
        )
        rows.mul_(noise).add_(centres[part])
        features[start : start + len(part)].copy_(rows)


def load(
    name: str,
    *,
    directory: str | None = None,
    statistics: GraphStatistics | None = None,
    features: str | None = None,
    seed: int = 0,
    device: str = "auto",
) -> NodeDataset:
    """The data set that a config names; under torchrun loaded once and shared.

    Args:
        name: "generated", or a file of `planetoid` ("cora", "citeseer").
        directory: where planetoid files lie.
        statistics: of the generated graph; None: those of ogbn-products.
        features: a ``.npy`` file with a row for each node, in place of the set's own.
        seed: of the generated graph.
        device: where to generate; "auto" takes the GPU if there is one.

    Raises:
        ValueError: a planetoid name without a directory, or a file of features that
            is damaged or of another number of nodes.
    """
    ranks = Ranks.join(device)

    def make() -> NodeDataset:
        made = own()
        if features is None:
            return made
        rows = read_rows(features, made.graph.num_nodes)
        return replace(made, features=rows)

    def own() -> NodeDataset:
        if name == "generated":
            given = statistics or GraphStatistics()
            return generated(given, seed=seed, device=str(ranks.device))
        if directory is None:
            raise ValueError(
                f"dataset {name!r} expects trainer.dataset.directory, where {name}.npz "
                'lies; "generated" needs none'
            )
        return planetoid(directory, name)

    return share_dataset(ranks, make() if ranks.is_first else None)


def share_dataset(ranks: Ranks, dataset: NodeDataset | None) -> NodeDataset:
    """The first rank's data set in every process, its tensors as shared memory.

    Args:
        ranks: all call this; in a run of one process the data set stays as it is.
        dataset: of the first rank, which copies it once.
    """
    if ranks.size == 1:
        if dataset is None:
            raise ValueError("share_dataset: expects the first rank's set, got none")
        return dataset
    graph = None if dataset is None else dataset.graph
    num_classes, is_weighted, is_symmetric = ranks.share_numbers(
        0 if dataset is None else dataset.num_classes,
        int(graph is not None and graph.weights is not None),
        int(graph is not None and graph.symmetric),
    )
    title = (
        None
        if dataset is None
        else torch.tensor(list(dataset.name.encode()), device="cpu")
    )

    def part(owner: NodeDataset | Graph | None, name: str) -> torch.Tensor:
        return ranks.share(None if owner is None else getattr(owner, name))

    return NodeDataset(
        name=bytes(ranks.share(title).tolist()).decode(),
        graph=Graph(
            offsets=part(graph, "offsets"),
            neighbors=part(graph, "neighbors"),
            weights=part(graph, "weights") if is_weighted else None,
            symmetric=bool(is_symmetric),
        ),
        features=part(dataset, "features"),
        labels=part(dataset, "labels"),
        num_classes=num_classes,
        train_nodes=part(dataset, "train_nodes"),
        valid_nodes=part(dataset, "valid_nodes"),
        test_nodes=part(dataset, "test_nodes"),
    )
