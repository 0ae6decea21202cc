"""Triple files: N-Triples and tab-separated, plain and compressed."""

import gzip
import lzma
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hector.datasets.triples import (
    TripleFormatError,
    number,
    parse_ntriples,
    parse_tsv,
    read_triples,
)

LINES = r"""# a comment
<http://a> <http://p> <http://b> .
_:x <http://p> "text with \"quotes\" and \t tab"@en-GB .

<http://a> <http://q> "12"^^<http://int> . # trailing
<http://a><http://q>_:x.
"""


def test_ntriples_terms(tmp_path: Path) -> None:
    path = tmp_path / "graph.nt"
    path.write_text(LINES)
    assert list(parse_ntriples(path)) == [
        ("http://a", "http://p", "http://b"),
        ("_:x", "http://p", r'"text with \"quotes\" and \t tab"@en-GB'),
        ("http://a", "http://q", '"12"^^<http://int>'),
        ("http://a", "http://q", "_:x"),
    ]


@pytest.mark.parametrize(
    "line",
    ["<a> <p> .", "<a> <p> <b>", '"s" <p> <b> .', "<a> _:p <b> .", '<a> <p> "b .'],
)
def test_wrong_ntriples_lines_are_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "graph.nt"
    path.write_text(f"<a> <p> <b> .\n{line}\n")
    with pytest.raises(TripleFormatError, match=r"graph\.nt:2, got"):
        list(parse_ntriples(path))


def test_wrong_columns_are_named(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_text("a\tr\tb\na b c\n")
    with pytest.raises(TripleFormatError, match=r"train\.txt:2, got 1 columns"):
        list(parse_tsv(path))


def test_compressed_files_read_like_plain_ones(tmp_path: Path) -> None:
    text = b"a\tr\tb\nb\ts\ta\n"
    (tmp_path / "a.tsv").write_bytes(text)
    (tmp_path / "a.tsv.gz").write_bytes(gzip.compress(text))
    (tmp_path / "a.tsv.xz").write_bytes(lzma.compress(text))
    (tmp_path / "g.nt.gz").write_bytes(gzip.compress(LINES.encode()))
    plain = read_triples(tmp_path / "a.tsv")
    for suffix in ("gz", "xz"):
        packed = read_triples(tmp_path / f"a.tsv.{suffix}")
        assert packed.entities == plain.entities == ("a", "b")
        assert torch.equal(packed.tail, plain.tail)
    both = read_triples(tmp_path / "g.nt.gz", tmp_path / "a.tsv")
    assert both.relations == ("http://p", "http://q", "r", "s")


name = st.sampled_from("abcdef")


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(name, st.sampled_from("rst"), name), max_size=20))
def test_inverses_mirror_every_triple(rows: list[tuple[str, str, str]]) -> None:
    triples = number(rows)
    back = [
        (triples.entities[h], triples.relations[r], triples.entities[t])
        for h, r, t in zip(
            triples.head.tolist(),
            triples.relation.tolist(),
            triples.tail.tolist(),
            strict=True,
        )
    ]
    assert back == rows
    graph = triples.to_graph()
    count = len(triples.relations)
    assert graph.num_edge_types == 2 * count
    edges = sorted(
        zip(
            graph.src.tolist(),
            graph.edge_type.tolist(),
            graph.dst.tolist(),
            strict=True,
        )
    )
    mirrored = sorted((t, (r + count) % (2 * count), h) for h, r, t in edges)
    assert mirrored == edges
    assert triples.to_graph(inverses=False).num_edges == len(rows)
