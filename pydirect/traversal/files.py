"""Graphs of files, for the command line. What is wrong with one is said by line.

Text is read in blocks by numpy's parser; where that refuses a block, its lines are read
one by one until the bad one is found.
"""

import bz2
import codecs
import gzip
import io
import itertools
import lzma
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from pydirect.memory.limits import read_limits
from pydirect.sampling import Graph
from pydirect.traversal.array_files import LARGEST, Edges, merged_entries, of_arrays
from pydirect.traversal.network_files import CUT, READERS, of_networkx

_BLOCK_BYTES = 1 << 24
_PIECE_BYTES = 1 << 16
_OPENERS: dict[str, Callable[[Path], Any]] = {
    ".gz": lambda path: gzip.open(path, "rb"),
    ".xz": lambda path: lzma.open(path, "rb"),
    ".bz2": lambda path: bz2.open(path, "rb"),
}
_OTHER_FORMS = (".adjlist", ".multiline_adjlist")
"""Text whose lines look like edges and are none."""
_BLANKS = bytes.maketrans(b",;\t", b"   ")
_NODE_BYTES = 48
"""Of a node: while edges are sorted its count and offset, its name, its result."""
_BANNER = b"%%matrixmarket"
_EMPTY = re.compile(rb"([,;])[ \t]*(?=[,;])|^[ \t]*(?=[,;])", re.MULTILINE)
_NOTHING = b"(nothing)"
"""Stands where a field between separators is empty."""
_PROMISE = re.compile(rb"nodes:\s*(\d+)\s+edges:\s*(\d+)", re.IGNORECASE)

Note = Callable[[str], None]


class GraphFile(NamedTuple):
    """A graph, and what its file calls the nodes."""

    graph: Graph
    names: "Sequence[Any] | torch.Tensor"
    """By node: numbers as int64, or names."""

    def nodes(self, wanted: Sequence[str]) -> list[int]:
        """Find nodes by their names.

        Raises:
            ValueError: a name that the file does not have.
        """
        known = self.names
        names = known.tolist() if isinstance(known, torch.Tensor) else known
        number = {str(name): node for node, name in enumerate(names)}
        for name in wanted:
            if name not in number:
                few = ", ".join(itertools.islice(number, 3)) or "none"
                raise ValueError(
                    f"expects nodes of the file, which has {len(number)} ({few}, ...), "
                    f"got {name!r}"
                )
        return [number[name] for name in wanted]


def read_graph(
    path: str | Path,
    *,
    weighted: bool = False,
    undirected: bool = False,
    num_nodes: int | None = None,
    note: Note = lambda text: None,
) -> GraphFile:
    """Read a graph, listed by targets.

    Args:
        path: ``.mtx`` is Matrix Market's coordinates; ``.npz`` scipy's, or
            ``edge_index`` with ``edge_weight``; ``.npy`` an ``edge_index``;
            ``.graphml``, ``.gml`` and ``.json`` (node-link) what networkx writes;
            anything else lines of source, target and weight. ``.gz``, ``.xz`` and
            ``.bz2`` after any of them.
        weighted: take weights along; 0 or more.
        undirected: store each edge in both directions.
        num_nodes: nodes are numbered from 0 below this. None: as many as the file
            says, and of lines those that they name.
        note: told what is done.

    Returns:
        The graph and its nodes' names.

    Raises:
        ValueError: a file that is damaged or of another form; names line and value.
        OSError: a file that cannot be read.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    packed = _OPENERS.get(suffix)
    if packed is not None:
        suffix = path.with_suffix("").suffix.lower()
        if path.is_file() and not path.stat().st_size:
            raise ValueError(f"{path}: expects compressed data, got an empty file")
    if suffix in _OTHER_FORMS:
        raise ValueError(
            f"{path}: expects a line for each edge, got a name of {suffix}: write it "
            "with networkx.write_graphml or networkx.write_edgelist(data=False)"
        )
    note(f"reading {path}")
    with packed(path) if packed else path.open("rb") as file:
        if suffix in READERS:
            if num_nodes is not None:
                raise ValueError(f"{path}: expects no --nodes: the file has its own")
            ways = {"weighted": weighted, "undirected": undirected}
            return GraphFile(*of_networkx(path, suffix, file, **ways))
        if suffix in (".npz", ".npy"):
            edges, names = of_arrays(path, file, weighted=weighted), None
        elif suffix == ".mtx":
            edges, names = _Lines(path, file, weighted, None, note).matrix(), None
        else:
            lines = _Lines(path, file, weighted, num_nodes, note)
            edges = lines.edges()
            names = None
            if num_nodes is None:
                distinct, inverse = np.unique(edges.ends, return_inverse=True)
                names = torch.from_numpy(distinct)
                index = inverse.reshape(2, -1)
                edges = edges._replace(ends=index, num_nodes=len(distinct))
    total = edges.num_nodes if num_nodes is None else num_nodes
    if total < edges.num_nodes:
        raise ValueError(
            f"{path}: expects at most {total} nodes, as --nodes says, got "
            f"{edges.num_nodes}"
        )
    _check_memory(path, total)
    note(f"sorting {edges.ends.shape[1]:,} edges")
    graph = Graph.from_edges(
        torch.from_numpy(edges.ends),
        total,
        symmetric=undirected or edges.symmetric,
        weights=None if edges.weights is None else torch.from_numpy(edges.weights),
        outgoing=True,
    )
    return GraphFile(
        graph, torch.arange(total, device="cpu") if names is None else names
    )


class _Lines:
    """Lines of a text file: source, target, and perhaps more."""

    def __init__(
        self,
        path: Path,
        file: io.BufferedIOBase,
        weighted: bool,
        num_nodes: int | None,
        note: Note,
    ) -> None:
        self._path, self._file, self._note = path, file, note
        self._weighted = weighted
        self._limit = num_nodes
        self._first = 0
        """The least number of a node."""
        self._pattern = False
        self._columns: tuple[int, int] | None = None
        """How many there are, and the line that shows it."""
        self._line = 0
        """Lines read."""

    def edges(self) -> Edges:
        """A list of edges, with comments and perhaps a heading."""
        promises: list[tuple[int, int]] = []
        parts = list(self._parts(promises))
        index, weights = _joined(parts)
        if promises and promises[0][1] != index.shape[1]:
            line, promised = promises[0]
            raise ValueError(
                f"{self._path}:{line}: expects {promised} edges, as this line says, "
                f"got {index.shape[1]}: the file is cut off, or, if it is whole, "
                "remove this line"
            )
        if self._weighted and weights is None:
            weights = np.empty(0, dtype=np.int64)
        most = int(index.max(initial=-1)) + 1
        return Edges(index, weights, most if self._limit is None else self._limit)

    def matrix(self) -> Edges:
        """A Matrix Market file."""
        first = self._next().removeprefix(codecs.BOM_UTF8)
        head = first.decode("latin-1").lower().split()
        if head[:2] != ["%%matrixmarket", "matrix"] or len(head) != 5:
            raise self._error(
                1, "'%%MatrixMarket matrix coordinate TYPE SYMMETRY'", " ".join(head)
            )
        layout, field, symmetry = head[2:]
        kinds = ("coordinate",), ("real", "integer", "pattern"), (
            "general",
            "symmetric",
        )  # fmt: skip
        for word, known in zip((layout, field, symmetry), kinds, strict=True):
            if word not in known:
                raise self._error(1, " or ".join(known), word)
        self._pattern = field == "pattern"
        size = self._next()
        while size.startswith(b"%") or not size.strip():
            if not size:
                raise self._error(self._line, "rows, columns and entries", "the end")
            size = self._next()
        numbers = size.split()
        if len(numbers) != 3 or not all(n.isdigit() for n in numbers):
            raise self._error(self._line, "rows, columns and entries", size)
        rows, columns, entries = map(int, numbers)
        if rows != columns:
            raise self._error(self._line, "as many rows as columns", size)
        self._first, self._limit = 1, rows + 1
        self._columns = (2 if self._pattern else 3, self._line)
        said = self._line
        index, weights = _joined(list(self._parts([])))
        if index.shape[1] != entries:
            raise ValueError(
                f"{self._path}:{self._line}: expects {entries} entries, as line {said} "
                f"says, got {index.shape[1]} to the end of the file"
            )
        if self._weighted and weights is None:
            weights = np.ones(entries, dtype=np.int64)
        index, weights = merged_entries(index - 1, weights)
        return Edges(index, weights, rows, symmetry == "symmetric")

    def _next(self) -> bytes:
        self._line += 1
        return self._read(self._file.readline)

    def _block(self) -> bytes:
        """The next lines, whole. Piece by piece: of data that is cut off, the lines
        before the end are counted."""
        pieces: list[bytes] = []
        num_bytes = 0
        while num_bytes < _BLOCK_BYTES:
            piece = self._read(lambda: self._file.read1(_PIECE_BYTES), pieces)
            if not piece:
                return b"".join(pieces)
            pieces.append(piece)
            num_bytes += len(piece)
        pieces.append(self._read(self._file.readline, pieces))
        return b"".join(pieces)

    def _read(self, call: Callable[[], bytes], before: Sequence[bytes] = ()) -> bytes:
        try:
            return call()
        except (*CUT, OSError) as error:
            line = self._line + sum(piece.count(b"\n") for piece in before)
            raise ValueError(
                f"{self._path}:{line}: expects more lines, got the end of "
                f"compressed data that is cut off or damaged ({error})"
            ) from error

    def _parts(
        self, promises: list[tuple[int, int]]
    ) -> Iterator["np.ndarray[Any, Any]"]:
        """Structured arrays u, v and perhaps w, a block of lines each."""
        total = 0
        while True:
            block = self._block()
            if not block:
                return
            if not self._line:
                block = block.removeprefix(codecs.BOM_UTF8)
                if block[: len(_BANNER)].lower() == _BANNER:
                    raise self._error(1, "a name that ends in .mtx", block.split()[0])
            block = block.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
            if b"," in block or b";" in block:
                block = _EMPTY.sub(rb"\1" + _NOTHING, block)
            lines = block.translate(_BLANKS).split(b"\n")
            if not lines[-1]:
                lines.pop()
            begin, self._line = self._line + 1, self._line + len(lines)
            if b"#" in block or b"%" in block:
                promises += _without_comments(lines, begin)
            if self._columns is None:
                self._look(lines, begin)
            part = self._parsed(lines, begin)
            total += len(part)
            self._note(f"reading {self._path}: {total:,} edges")
            yield part

    def _look(self, lines: list[bytes], begin: int) -> None:
        """Count the columns; leave out the heading of a .csv or .tsv."""
        full = [at for at, line in enumerate(lines) if line.strip()][:2]
        if not full:
            return
        fields = [lines[at].split() for at in full]
        csv = {".csv", ".tsv"} & {each.lower() for each in self._path.suffixes}
        numeric = [re.fullmatch(rb"['\"]?-?\d+['\"]?", field) for field in fields[0]]
        other = len(fields) > 1 and len(fields[1]) != len(fields[0])
        if csv and (not any(numeric) or (other and not numeric[0])):
            self._check_heading(fields[0], begin + full[0])
            lines[full[0]] = b""
            fields, full = fields[1:], full[1:]
        if full:
            self._columns = (len(fields[0]), begin + full[0])

    def _check_heading(self, names: list[bytes], line: int) -> None:
        """
        Raises:
            ValueError: what is asked for is said to stand in other columns.
        """
        lower = [name.strip(b"'\"").lower() for name in names]
        for place, name in enumerate((b"source", b"target", b"weight")):
            asked = place < 2 or self._weighted
            if asked and name in lower and lower.index(name) != place:
                what = f"{name.decode()} in column {place + 1}"
                raise self._error(line, what, b" ".join(names))

    def _parsed(self, lines: list[bytes], begin: int) -> "np.ndarray[Any, Any]":
        if self._columns is None:
            return np.empty(0, dtype=[("u", np.int64), ("v", np.int64)])
        num, _ = self._columns
        takes = self._weighted and not self._pattern
        if num < 2 + takes:
            self._blame(lines, begin)
        refusal: Exception | None = None
        for kind in (np.int64, np.float64) if takes else (np.int64,):
            types: list[tuple[str, Any]] = [("u", np.int64), ("v", np.int64)]
            types += [("w", kind)] * takes
            types += [(f"c{i}", "S1") for i in range(len(types), num)]
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    part = np.loadtxt(lines, types, comments=None, ndmin=1)
            except (ValueError, Warning) as error:
                if "no data" in str(error):
                    return np.empty(0, dtype=types)
                refusal = error
                continue
            ends = np.stack([part["u"], part["v"]])
            most = LARGEST if self._limit is None else self._limit - 1
            bad = bool(((ends < self._first) | (ends > most)).any())
            if bad or (takes and not bool((part["w"] >= 0).all())):
                self._blame(lines, begin)
            return part
        self._blame(lines, begin)
        raise ValueError(
            f"{self._path}: lines {begin} to {begin + len(lines) - 1}: {refusal}"
        )

    def _blame(self, lines: list[bytes], begin: int) -> None:
        """
        Raises:
            ValueError: the first bad line.
        """
        num, shown = self._columns or (2, begin)
        takes = self._weighted and not self._pattern
        for at, line in enumerate(lines, begin):
            fields = line.split()
            if not fields:
                continue
            if len(fields) < 2 + takes:
                what = "source, target and weight" if takes else "source and target"
                raise self._error(at, what, line)
            if len(fields) != num:
                raise self._error(at, f"{num} columns, as in line {shown}", line)
            for field in fields[:2]:
                self._blame_node(at, field)
            if takes:
                try:
                    right = float(fields[2]) >= 0 and b"_" not in fields[2]
                except ValueError:
                    right = False
                if not right:
                    raise self._error(at, "a weight of 0 or more", fields[2])

    def _blame_node(self, at: int, field: bytes) -> None:
        if not re.fullmatch(rb"-?\d+", field):
            raise self._error(at, "the number of a node", field)
        if int(field) < self._first:
            raise self._error(at, f"nodes numbered from {self._first}", field)
        if int(field) > LARGEST:
            raise self._error(at, "a number of at most 63 bits", field)
        if self._limit is not None and int(field) >= self._limit:
            raise self._error(
                at, f"nodes numbered {self._first} to {self._limit - 1}", field
            )

    def _error(self, line: int, expected: str, got: bytes | str) -> ValueError:
        text = got if isinstance(got, str) else got.decode("utf-8", "replace")
        return ValueError(f"{self._path}:{line}: expects {expected}, got {text[:60]!r}")


def _without_comments(lines: list[bytes], begin: int) -> list[tuple[int, int]]:
    """Empty the comments; the lines that say how many edges there are, and how many."""
    promises = []
    for at, line in enumerate(lines):
        if line.lstrip()[:1] in (b"#", b"%"):
            if found := _PROMISE.search(line):
                promises.append((begin + at, int(found[2])))
            lines[at] = b""
    return promises


def _joined(
    parts: "list[np.ndarray[Any, Any]]",
) -> "tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]":
    """Ends, shape (2, num_edges), and weights, int64 where all are."""
    empty = np.empty(0, dtype=np.int64)
    ends = [np.concatenate([empty, *(part[end] for part in parts)]) for end in "uv"]
    weights = [part["w"] for part in parts if "w" in (part.dtype.names or ())]
    return np.stack(ends), np.concatenate(weights) if weights else None


def _check_memory(path: Path, num_nodes: int) -> None:
    """
    Raises:
        ValueError: so many nodes that the machine would kill the process.
    """
    needed = _NODE_BYTES * num_nodes
    free = read_limits().available_bytes
    if free is not None and needed > free:
        raise ValueError(
            f"{path}: {num_nodes:,} nodes need {needed:,} bytes of memory, this "
            f"machine has {free:,}: nodes are numbered from 0 to the largest number"
        )
