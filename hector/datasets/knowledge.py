"""FB15k-237 and the small ogbn-mag subset, from a given directory."""

import io
import lzma
import tokenize
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hector.datasets.triples import read_triples
from hector.graph import HeteroGraph

_MAG_RELATIONS = {
    "citing": ("paper", "paper"),
    "writing": ("author", "paper"),
    "is-about": ("paper", "field"),
}
_UNREADABLE = (
    lzma.LZMAError,
    ValueError,
    EOFError,
    MemoryError,
    SyntaxError,
    tokenize.TokenError,
)
"""What lzma and numpy raise for a damaged file."""
_MAG_NODES = {"paper": 73_638, "author": 73_638, "field": 6_001}


def load_fb15k_237(directory: str | Path, *, inverses: bool = True) -> HeteroGraph:
    """All triples of train, valid and test: 14,541 nodes, 620,232 edges of 474
    relations with inverses. Files `train.txt`, `valid.txt`, `test.txt`, each plain
    or compressed."""
    files = [_one(Path(directory), part) for part in ("train", "valid", "test")]
    return read_triples(*files).to_graph(inverses=inverses)


def load_ogbn_mag_small(directory: str | Path, *, inverses: bool = True) -> HeteroGraph:
    """The tenth of ogbn-mag published with Wu's code (`*_coo_2.npy`, int32
    [2, num_edges]): papers, authors and fields, three relations and their inverses.
    """
    counts = list(_MAG_NODES.values())
    first = dict(zip(_MAG_NODES, np.cumsum([0, *counts[:-1]]).tolist(), strict=True))
    src, dst, kind, names = [], [], [], []
    for index, (relation, (a, b)) in enumerate(_MAG_RELATIONS.items()):
        ends = _MAG_NODES[a], _MAG_NODES[b]
        rows = _array(Path(directory), f"{relation}_coo_2.npy", ends) + torch.tensor(
            [[first[a]], [first[b]]], device="cpu"
        )
        src.append(rows[0])
        dst.append(rows[1])
        kind.append(torch.full_like(rows[0], index))
        names.append((a, relation, b))
    if inverses:
        src, dst = src + dst, dst + src
        kind += [k + len(_MAG_RELATIONS) for k in kind]
        names += [(b, f"rev_{relation}", a) for a, relation, b in names]
    node_type = torch.arange(len(counts), device="cpu").repeat_interleave(
        torch.tensor(counts, device="cpu")
    )
    graph = HeteroGraph.from_arrays(
        torch.cat(src), torch.cat(dst), torch.cat(kind), node_type=node_type
    )
    return graph.replace(
        node_type_names=tuple(_MAG_NODES), edge_type_names=tuple(names)
    )


def _one(directory: Path, part: str) -> Path:
    for suffix in (".txt", ".txt.gz", ".txt.xz", ".tsv", ".tsv.gz", ".tsv.xz"):
        if (path := directory / f"{part}{suffix}").is_file():
            return path
    raise FileNotFoundError(f"expected {part}.txt (or .gz, .xz) in {directory}")


def _array(directory: Path, name: str, num_nodes: tuple[int, int]) -> Tensor:
    """Edges from an integer .npy array, plain or .xz, as int64 [2, num_edges].

    Raises:
        ValueError: the file is damaged, or names a node that there is not.
    """
    plain, packed = directory / name, directory / f"{name}.xz"
    path = plain if plain.is_file() else packed
    if not path.is_file():
        raise FileNotFoundError(f"expected {name} (or {name}.xz) in {directory}")
    try:
        data = path.read_bytes()
        data = data if path == plain else lzma.decompress(data)
        array = np.load(io.BytesIO(data), allow_pickle=False)
    except _UNREADABLE as error:
        raise ValueError(f"expected an .npy array in {path}, got {error}") from error
    edges = np.asarray(array)
    right = edges.ndim == 2 and len(edges) == 2 and edges.dtype.kind in "iu"
    if not right or any(
        rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < count
        for rows, count in zip(edges, num_nodes, strict=True)
    ):
        raise ValueError(
            f"expected integers [2, num_edges] below {num_nodes} in {path}, got "
            f"{edges.dtype} {list(edges.shape)}"
        )
    return torch.from_numpy(edges.astype(np.int64))
