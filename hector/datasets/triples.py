"""Triples (head, relation, tail) out of text files: N-Triples and tab-separated.

Plain, `.gz` and `.xz` files are read the same way.
"""

import gzip
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from hector.graph import HeteroGraph

# One N-Triples line (W3C recommendation, section 2): IRIs and blank nodes, and a
# literal with optional language tag or datatype as the object.
_RESOURCE = r"<[^<>\"{}|^`\\\x00-\x20]*>|_:[^\s<>\"]+"
_LITERAL = r'"(?:[^"\\]|\\.)*"(?:@[A-Za-z0-9-]+|\^\^<[^>]*>)?'
_LINE = re.compile(
    rf"\s*({_RESOURCE})\s*(<[^>]*>)\s*({_RESOURCE}|{_LITERAL})\s*\.\s*(?:#.*)?$"
)

Triple = tuple[str, str, str]


_UNREADABLE = (
    gzip.BadGzipFile,
    lzma.LZMAError,
    zlib.error,
    EOFError,
    UnicodeError,
)


class TripleFormatError(ValueError):
    """A line of a triple file is not a triple, or the file is damaged."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Triples:
    """Numbered triples with the names after the numbers."""

    head: Tensor
    """int64 [num_triples]."""
    relation: Tensor
    """int64 [num_triples]."""
    tail: Tensor
    """int64 [num_triples]."""
    entities: tuple[str, ...]
    """Entity names in order of id."""
    relations: tuple[str, ...]
    """Relation names in order of id."""

    def to_graph(self, *, inverses: bool = True) -> HeteroGraph:
        """The graph of the triples, edges head to tail, one node type.

        With `inverses`, relation r + num_relations is r from tail to head, and edge
        i + num_triples the inverse of edge i, as R-GCN's entity classification uses
        them (Schlichtkrull et al., 2018).
        """
        src, dst, kind = self.head, self.tail, self.relation
        count = len(self.relations)
        if inverses:
            src, dst = torch.cat([src, dst]), torch.cat([dst, src])
            kind = torch.cat([kind, kind + count])
            count *= 2
        return HeteroGraph.from_arrays(
            src, dst, kind, num_nodes=len(self.entities), num_edge_types=count
        )


@contextmanager
def open_text(path: str | Path) -> Iterator[IO[str]]:
    """A UTF-8 text file, decompressed by its suffix.

    Raises:
        TripleFormatError: it is not what its suffix says, or not UTF-8.
    """
    path = Path(path)
    openers: dict[str, Callable[..., IO[str]]] = {".gz": gzip.open, ".xz": lzma.open}
    opens = openers.get(path.suffix, open)
    try:
        with opens(path, "rt", encoding="utf-8", newline="\n") as file:
            yield file
    except _UNREADABLE as error:
        raise TripleFormatError(
            f"expected UTF-8 text in {path}, plain or compressed as its suffix says, "
            f"got {type(error).__name__}: {error}"
        ) from error


def parse_ntriples(path: str | Path) -> Iterator[Triple]:
    """(subject, predicate, object) of an N-Triples file: IRIs without their angle
    brackets, blank nodes and literals as written. Comments and empty lines are
    skipped; any other line raises TripleFormatError.
    """
    with open_text(path) as file:
        for number, line in enumerate(file, 1):
            match = _LINE.match(line)
            if match is None:
                if line.strip() and not line.lstrip().startswith("#"):
                    raise TripleFormatError(
                        f"expected an N-Triples statement at {path}:{number}, got "
                        f"{line.strip()[:80]!r}"
                    )
                continue
            subject, predicate, obj = match.groups()
            yield _bare(subject), _bare(predicate), _bare(obj)


def parse_tsv(path: str | Path) -> Iterator[Triple]:
    """(head, relation, tail) of a tab-separated file without a header."""
    with open_text(path) as file:
        for number, line in enumerate(file, 1):
            parts = line.rstrip("\r\n").split("\t")
            if len(parts) != 3:
                raise TripleFormatError(
                    f"expected head<TAB>relation<TAB>tail at {path}:{number}, got "
                    f"{len(parts)} columns: {line.strip()[:80]!r}"
                )
            yield parts[0], parts[1], parts[2]


def number(triples: Iterable[Triple]) -> Triples:
    """Number entities and relations by first appearance (head before tail)."""
    entities: dict[str, int] = {}
    relations: dict[str, int] = {}
    rows = [
        (
            entities.setdefault(head, len(entities)),
            relations.setdefault(relation, len(relations)),
            entities.setdefault(tail, len(entities)),
        )
        for head, relation, tail in triples
    ]
    table = torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(-1, 3)
    head, relation, tail = (c.contiguous() for c in table.T)
    return Triples(
        head=head,
        relation=relation,
        tail=tail,
        entities=tuple(entities),
        relations=tuple(relations),
    )


def read_triples(*paths: str | Path) -> Triples:
    """Number the triples of several files together; `.nt` files are N-Triples, all
    others tab-separated. Each may be compressed."""
    return number(t for path in paths for t in _parser(Path(path))(path))


def _parser(path: Path) -> Callable[[str | Path], Iterator[Triple]]:
    return parse_ntriples if ".nt" in path.suffixes else parse_tsv


def _bare(term: str) -> str:
    return term[1:-1] if term.startswith("<") else term
