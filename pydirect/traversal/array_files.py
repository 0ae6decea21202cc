"""Graphs of numpy's and scipy's files. What is wrong with one is said by name."""

from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

LARGEST = np.iinfo(np.int64).max


class Edges(NamedTuple):
    """Edges as a file lists them."""

    ends: "np.ndarray[Any, Any]"
    """int64, shape (2, num_edges)."""

    weights: "np.ndarray[Any, Any] | None"
    num_nodes: int
    symmetric: bool = False


def _loaded(path: Path, file: IO[bytes]) -> "dict[str, np.ndarray[Any, Any]]":
    """
    Raises:
        ValueError: numpy cannot read it.
    """
    try:
        found = np.load(file, allow_pickle=False)
        return {"edge_index": found} if isinstance(found, np.ndarray) else dict(found)
    # What its parsers raise of damaged headers is of a dozen kinds.
    except Exception as error:
        raise ValueError(
            f"{path}: expects numpy's arrays, got a file that is cut off or damaged "
            f"({type(error).__name__}: {error})"
        ) from error


def of_arrays(path: Path, file: IO[bytes], *, weighted: bool) -> Edges:
    """Read ``.npz`` and ``.npy``.

    Raises:
        ValueError: damaged, no graph, or a node out of range.
    """
    arrays = _loaded(path, file)
    name, index, values = _entries(path, arrays)
    if index.ndim != 2 or len(index) != 2:
        raise ValueError(
            f"{path}: {name}: expects shape (2, edges), got {list(index.shape)}"
        )
    limit = _num_nodes(path, arrays.get("shape", arrays.get("num_nodes")))
    if limit is None:
        limit = int(index.max(initial=-1)) + 1
    bad = np.flatnonzero(((index < 0) | (index >= limit)).any(0))
    if len(bad):
        at = int(bad[0])
        raise ValueError(
            f"{path}: {name}: expects nodes 0 to {limit - 1}, got "
            f"{index[:, at].tolist()} at edge {at}"
        )
    if name == "indices" and len(arrays["indptr"]) != limit + 1:
        raise ValueError(
            f"{path}: indptr: expects {limit + 1} numbers for {limit} nodes, got "
            f"{len(arrays['indptr'])}"
        )
    if name != "edge_index":
        index, values = merged_entries(index, values if weighted else None)
    weights = _weights_of(path, values, index.shape[1:]) if weighted else None
    return Edges(index, weights, limit)


def merged_entries(
    ends: "np.ndarray[Any, Any]", values: Any
) -> "tuple[np.ndarray[Any, Any], Any]":
    """Entries of a matrix, each once: one that is stored in parts is their sum, as in
    scipy. Values that are not one an entry stay as they are."""
    for major, minor in (ends, ends[::-1]):
        step = np.diff(major)
        if bool(((step > 0) | ((step == 0) & (np.diff(minor) > 0))).all()):
            return ends, values  # in order, and none twice, as in most files
    order = np.lexsort(ends[::-1])
    ranked = ends[:, order]
    new = np.append(True, (np.diff(ranked) != 0).any(0))
    if values is not None and values.shape == order.shape and values.dtype.kind != "O":
        kind = np.int64 if values.dtype.kind == "b" else None
        values = np.add.reduceat(values[order], np.flatnonzero(new), dtype=kind)
    return ranked[:, new], values


def _num_nodes(path: Path, shape: Any) -> int | None:
    """How many nodes the file says there are.

    Raises:
        ValueError: that is no number, or a matrix is no square.
    """
    if shape is None:
        return None
    sizes = set(np.atleast_1d(shape).flatten().tolist())
    if len(sizes) != 1:
        raise ValueError(f"{path}: shape: expects a square, got {sorted(sizes)}")
    (size,) = sizes
    if not isinstance(size, int) or size < 0:
        raise ValueError(f"{path}: expects a number of nodes, got {size!r}")
    return size


def _entries(
    path: Path, arrays: "dict[str, np.ndarray[Any, Any]]"
) -> "tuple[str, np.ndarray[Any, Any], Any]":
    """What they are called, sources and targets, weights or None.

    Raises:
        ValueError: none of the known names, or lists out of order.
    """

    def integers(name: str) -> "np.ndarray[Any, Any]":
        found = arrays[name]
        if found.dtype.kind not in "iu":
            raise ValueError(f"{path}: {name}: expects integers, got {found.dtype}")
        if found.size and int(found.max()) > LARGEST:
            raise ValueError(
                f"{path}: {name}: expects numbers of at most 63 bits, got {found.max()}"
            )
        return found.astype(np.int64)

    if "edge_index" in arrays:
        weights = arrays.get("edge_weight", arrays.get("weights"))
        return "edge_index", integers("edge_index"), weights
    if "row" in arrays and "col" in arrays:
        ends = integers("row"), integers("col")
        if ends[0].shape != ends[1].shape:
            shapes = [list(end.shape) for end in ends]
            raise ValueError(f"{path}: row, col: expects one length, got {shapes}")
        return "row, col", np.stack(ends), arrays.get("data")
    if "indptr" not in arrays or "indices" not in arrays:
        raise ValueError(
            f"{path}: expects scipy's arrays (indptr, indices) or edge_index, got "
            f"{', '.join(arrays) or 'none'}"
        )
    form = str(arrays.get("format", "csr"))
    if "bsr" in form:
        raise ValueError(
            f"{path}: expects entries, got blocks (bsr): save matrix.tocsr()"
        )
    index = _of_lists(path, integers("indptr"), integers("indices"))
    if "csc" in form:
        index = index[::-1].copy()
    return "indices", index, arrays.get("data")


def _of_lists(
    path: Path, starts: "np.ndarray[Any, Any]", columns: "np.ndarray[Any, Any]"
) -> "np.ndarray[Any, Any]":
    """Rows and columns of compressed rows.

    Raises:
        ValueError: `starts` do not ascend from 0 to the end of `columns`.
    """
    if columns.ndim != 1 or starts.ndim != 1:
        raise ValueError(
            f"{path}: indptr: expects two lists, got shapes {list(starts.shape)} and "
            f"{list(columns.shape)}"
        )
    ends = np.append(starts, columns.size)
    falls = np.flatnonzero(np.diff(ends, prepend=0) < 0)
    if len(falls) or not len(starts) or starts[0] or starts[-1] != columns.size:
        at = int(falls[0]) if len(falls) else len(starts) - 1
        raise ValueError(
            f"{path}: indptr: expects ascending numbers from 0 to {columns.size}, got "
            f"{starts[:1].tolist()} first and {ends[at]} at {at}"
        )
    return np.stack([np.repeat(np.arange(len(starts) - 1), np.diff(starts)), columns])


def _weights_of(
    path: Path, values: Any, shape: tuple[int, ...]
) -> "np.ndarray[Any, Any]":
    """Weights as int64, float32 or float64.

    Raises:
        ValueError: not a weight of 0 or more for each edge.
    """
    if values is None or values.dtype.kind not in "biuf" or values.shape != shape:
        got = "none" if values is None else f"{values.dtype} {list(values.shape)}"
        raise ValueError(f"{path}: expects a weight for each edge, got {got}")
    floating = values.dtype.kind == "f"
    right = values >= 0
    bad = np.flatnonzero(~(right if floating else right & (values <= LARGEST)))
    if len(bad):
        at = int(bad[0])
        raise ValueError(
            f"{path}: expects weights of 0 or more, got {values[at]} at edge {at}"
        )
    wide = np.float64 if values.dtype.itemsize > 4 else np.float32
    return np.asarray(values, dtype=wide if floating else np.int64)
