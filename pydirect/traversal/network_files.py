"""Graphs of networkx's files. What is wrong with one is said by its place in it."""

import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any
from xml.etree import ElementTree

from pydirect.sampling import Graph
from pydirect.traversal.convert import from_networkx

CUT = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)
"""What a packed file raises that is cut off or damaged."""


def of_networkx(
    path: Path, suffix: str, file: IO[bytes], *, weighted: bool, undirected: bool
) -> tuple[Graph, list[Any]]:
    """Read one of `READERS`: the graph, and its nodes' names.

    Raises:
        ValueError: what networkx cannot read, an edge whose nodes are not in the file,
            or one without a weight of 0 or more.
    """
    import networkx

    wrong = (ValueError, SyntaxError, LookupError, TypeError, OSError, RecursionError)
    try:
        theirs = READERS[suffix](file, networkx)
        graph, names = from_networkx(theirs, weight="weight" if weighted else None)
        if weighted:
            for one, other, value in theirs.edges(data="weight"):
                if not value >= 0:
                    raise ValueError(
                        f"expects weights of 0 or more, got {value} on {one!r} to "
                        f"{other!r}"
                    )
    except (*wrong, *CUT, networkx.NetworkXException) as error:
        raise ValueError(f"{path}: {error}") from error
    if undirected and not graph.symmetric:
        # Not by networkx, which keeps one weight of two that lead there and back.
        ends = graph.to_edge_index().flip(0)
        graph = Graph.from_edges(
            *(ends, graph.num_nodes),
            symmetric=True,
            weights=graph.weights,
            outgoing=True,
        )
    return graph, names


def _graphml(file: IO[bytes], networkx: Any) -> Any:
    """GraphML; networkx would make nodes that are missing."""
    data = file.read()
    root = ElementTree.fromstring(data)
    ids = [node.get("id") for node in root.findall(".//{*}node")]
    _check_nodes("node", ids)
    ends = [
        {end: edge.get(end) for end in ("source", "target")}
        for edge in root.findall(".//{*}edge")
    ]
    _check_edges("edge", ends, set(ids))
    return networkx.read_graphml(io.BytesIO(data))


def _node_link(file: IO[bytes], networkx: Any) -> Any:
    """A graph of JSON, whose edges older versions of networkx call links."""
    document = json.load(file)
    named = document if isinstance(document, dict) else {}
    edges = "links" if "links" in named else "edges"
    for name in ("nodes", edges):
        if not isinstance(named.get(name), list):
            raise ValueError(
                "expects an object with lists of nodes and edges, as networkx's "
                f"node_link_data makes it, got {str(document)[:60]!r}"
            )
    ids = [node.get("id") for node in map(_fields, named["nodes"])]
    _check_nodes("nodes", ids)
    _check_edges(edges, list(map(_fields, named[edges])), set(ids))
    return networkx.node_link_graph(document, edges=edges)


def _fields(part: Any) -> dict[str, Any]:
    return part if isinstance(part, dict) else {}


def _check_nodes(what: str, ids: list[Any]) -> None:
    """
    Raises:
        ValueError: a node without a name, or of one that an earlier one has.
    """
    seen = set()
    for at, name in enumerate(ids):
        if not isinstance(name, int | float | str):
            raise ValueError(
                f"{what}[{at}]: expects an id, a number or a text, got {name!r}"
            )
        if name in seen:
            raise ValueError(f"{what}[{at}]: expects an id of its own, got {name!r}")
        seen.add(name)


def _check_edges(what: str, edges: list[dict[str, Any]], known: set[Any]) -> None:
    """
    Raises:
        ValueError: an edge from or to a node that is not in the file.
    """
    for at, edge in enumerate(edges):
        for end in ("source", "target"):
            name = edge.get(end)
            if isinstance(name, list) or name not in known:
                raise ValueError(
                    f"{what}[{at}]: expects a node of the file, got {name!r} as {end}"
                )


READERS: dict[str, Callable[[IO[bytes], Any], Any]] = {
    ".graphml": _graphml,
    ".gml": lambda file, networkx: networkx.read_gml(file, label="id"),
    ".json": _node_link,
}
