"""`ssdtrain graph`: files in, results out, and what is said of bad files."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networkx
import numpy as np
import pytest
import scipy.io
import scipy.sparse

from pydirect.memory.limits import MemoryLimits
from pydirect.traversal import files, sssp
from pydirect.traversal.files import read_graph
from ssdtrain.tools.cli import main

LINES = """# a comment
10 20 3
20 30 0.5

30 10 2
20 40 1
"""


def theirs() -> networkx.DiGraph:
    made = networkx.DiGraph()
    made.add_weighted_edges_from([(10, 20, 3), (20, 30, 0.5), (30, 10, 2), (20, 40, 1)])
    return made


def write_lines(path: Path) -> None:
    path.write_text(LINES)


def write_csv(path: Path) -> None:
    path.write_text("from,to,much\r\n" + LINES.replace(" ", ",").split("\n", 1)[1])


def write_gz(path: Path) -> None:
    path.write_bytes(gzip.compress(LINES.replace(" ", "\t").encode()))


def write_graphml(path: Path) -> None:
    networkx.write_graphml(theirs(), path)


def write_gml(path: Path) -> None:
    networkx.write_gml(theirs(), path)


def write_json(path: Path) -> None:
    path.write_text(json.dumps(networkx.node_link_data(theirs(), edges="links")))


def write_mtx(path: Path) -> None:
    scipy.io.mmwrite(path, matrix())


def write_csc(path: Path) -> None:
    scipy.sparse.save_npz(path, matrix().tocsc())


def write_coo(path: Path) -> None:
    scipy.sparse.save_npz(path, matrix())


def write_edges(path: Path) -> None:
    entries = matrix()
    ends = np.stack([entries.row, entries.col])
    np.savez(path, edge_index=ends, edge_weight=entries.data)


def matrix() -> scipy.sparse.coo_array:
    return scipy.sparse.coo_array(networkx.to_scipy_sparse_array(theirs()))


NUMBERED = {"a.mtx": write_mtx, "a.npz": write_csc, "b.npz": write_coo}
NUMBERED["c.npz"] = write_edges
NAMED = {"a.txt": write_lines, "a.csv": write_csv, "a.tsv.gz": write_gz}
NAMED |= {"a.graphml": write_graphml, "a.json": write_json}


@pytest.mark.parametrize(("name", "write"), [*NAMED.items(), *NUMBERED.items()])
def test_all_files_give_one_graph(
    name: str, write: Callable[[Path], None], tmp_path: Path
) -> None:
    path, out = tmp_path / name, tmp_path / "out.tsv"
    write(path)
    first = "10" if name in NAMED else "0"
    wanted = ["sssp", str(path), "--source", first, "--predecessors"]
    assert main(["graph", *wanted, "--out", str(out), "--device", "cpu"]) == 0
    rows = [line.split("\t") for line in out.read_text().splitlines()]
    assert rows.pop(0) == ["node", "distance", "predecessor"]
    lengths, paths = networkx.single_source_dijkstra(theirs(), 10)
    order = list(theirs())
    for node, length, before in rows:
        named = int(node) if name in NAMED else order[int(node)]
        assert float(length) == lengths[named]
        if named != 10:
            last = paths[named][-2]
            assert before == str(last if name in NAMED else order.index(last))


def test_other_forms_of_networkx(tmp_path: Path) -> None:
    path = tmp_path / "a.gml"
    write_gml(path)
    found = read_graph(path, weighted=True, undirected=True)
    assert found.graph.symmetric and found.graph.num_edges == 8


def test_matrices_with_both_directions(tmp_path: Path) -> None:
    path = tmp_path / "a.mtx"
    full = matrix().toarray()
    scipy.io.mmwrite(path, scipy.sparse.coo_array(full + full.T), symmetry="symmetric")
    found = read_graph(path, weighted=True).graph
    dense = np.zeros((4, 4))
    targets, sources = found.to_edge_index().numpy()
    np.add.at(dense, (sources, targets), found.weights.numpy())
    assert found.symmetric and np.array_equal(dense, full + full.T)


def test_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out, picture = (tmp_path / n for n in ("a.txt", "out.npz", "levels.svg"))
    write_lines(path)

    def ask(question: str, *words: str) -> dict:
        assert main(["graph", question, str(path), "--json", *words]) == 0
        return json.loads(capsys.readouterr().out)

    found = ask("bfs", "--source", "10", "--out", str(out), "--picture", str(picture))
    assert (found["reached"], found["farthest"], found["num_edges"]) == (4, 2, 4)
    assert len(found["steps"]) == 3 and found["bytes_read"] > 0
    with np.load(out) as result:
        assert result["node"].tolist() == [10, 20, 30, 40]
        assert result["level"].tolist() == [0, 1, 2, 2]
    assert "<svg" in picture.read_text()
    assert ask("bfs", "--source", "30,40")["reached"] == 4
    found = ask("components", "--nodes", "60", "--out", str(out))
    assert (found["components"], found["largest"]) == (57, 4)
    ask("pagerank", "--weighted", "--personalize", "20", "--out", str(out))
    want = networkx.pagerank(theirs(), personalization={20: 1}, tol=1e-12)
    with np.load(out) as result:
        got = dict(zip(result["node"].tolist(), result["rank"], strict=True))
    assert all(abs(got[node] - rank) < 1e-6 for node, rank in want.items())
    capsys.readouterr()
    assert main(["graph", "pagerank", str(path), "--max-iterations", "2"]) == 1
    assert "converged: False" in capsys.readouterr().out


MATRIX = "%%MatrixMarket matrix coordinate real general\n% words\n3 3 2\n"
GRAPHML = (
    '<graphml xmlns="http://graphml.graphdrawing.org/xmlns">'
    '<graph edgedefault="directed"><node id="a"/><node id="b"/>'
    '<edge source="a" target="b"/></graph></graphml>'
)
BAD = [
    ("a.txt", "1 2\n3 x\n", ":2: expects the number of a node, got 'x'"),
    ("a.txt", "1 2\n3 -4\n", ":2: expects nodes numbered from 0, got '-4'"),
    ("a.txt", "1 2\n3\n", ":2: expects source and target, got '3'"),
    ("a.txt", "1 2\n3 4 5\n", ":2: expects 2 columns, as in line 1, got '3 4 5'"),
    ("a.txt", "1 2\n3 99999999999999999999\n", ":2: expects a number of at most 63"),
    ("a.txt", "# Nodes: 3 Edges: 3\n1 2\n2 3\n", ":1: expects 3 edges, as this line"),
    ("a.csv", "u,v\n1,2\n3,\n", ":3: expects source and target, got '3"),
    ("a.mtx", "1 2\n", ":1: expects '%%MatrixMarket matrix"),
    ("a.mtx", MATRIX.replace("real", "complex"), ":1: expects real or integer or"),
    ("a.mtx", MATRIX + "1 1 4\n", ":4: expects 2 entries, as line 3 says, got 1"),
    ("a.mtx", MATRIX + "1 1 4\n0 1 1\n", ":5: expects nodes numbered from 1, got '0'"),
    ("a.mtx", MATRIX + "1 1 4\n1 4 1\n", ":5: expects nodes numbered 1 to 3, got '4'"),
    ("a.mtx", MATRIX.replace("3 3", "3 4"), ":3: expects as many rows as columns"),
    ("a.npz", "PK nothing", ": expects numpy's arrays, got a file that is cut off"),
    ("a.graphml", "<graphml>\n<graph", ": unclosed token: line 2"),
    ("a.json", '{"nodes": [{"id": 1}], "links": [{"source": 1, "target": 7}]}',
     ": links[0]: expects a node of the file, got 7"),
    ("a.txt", MATRIX + "1 1 4\n2 3 1\n", ":1: expects a name that ends in .mtx, got"),
    ("a.csv", "1,2x\n0,1,5\n", ":1: expects the number of a node, got '2x'"),
    ("a.csv", "u,v\n0,,1\n", ":2: expects the number of a node, got '(nothing)'"),
    ("a.CSV", '"0","1"\n', ":1: expects the number of a node, got '\"0\"'"),
    ("a.csv", "id,source,target\n0,1,2\n", ":1: expects source in column 1, got 'id"),
    ("a.adjlist", "0 1 2\n1 2 0\n", ": expects a line for each edge, got a name of"),
    ("a.txt.gz", "", ": expects compressed data, got an empty file"),
    ("a.graphml", GRAPHML.replace('target="b"', 'target="c"'),
     ": edge[0]: expects a node of the file, got 'c' as target"),
    ("a.graphml", GRAPHML.replace(' target="b"', ""),
     ": edge[0]: expects a node of the file, got None as target"),
    ("a.graphml", GRAPHML.replace('<node id="b"/>', '<node id="a"/>'),
     ": node[1]: expects an id of its own, got 'a'"),
    ("a.json", '{"nodes": [{}], "edges": []}', ": nodes[0]: expects an id, a number"),
    ("a.json", "[1]", ": expects an object with lists of nodes and edges, as networkx"),
    ("a.json", "[" * 100_000, ": maximum recursion depth exceeded"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "message"), BAD)
def test_bad_files(
    name: str,
    text: str,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / name
    path.write_text(text)
    out = tmp_path / "out.tsv"
    command = ["graph", "components", str(path), "--out", str(out)]
    assert main(command) == 2
    assert f"ssdtrain graph: {path}{message}" in capsys.readouterr().err
    assert not out.exists()


def test_more_bad_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.txt"
    packed, arrays = tmp_path / "a.txt.gz", tmp_path / "a.npz"
    path.write_text("1 2 1\n2 3 nan\n")
    packed.write_bytes(gzip.compress(LINES.encode() * 100)[:-20])
    np.savez(arrays, edge_index=np.array([[0, 1], [1, -5]]))
    links = tmp_path / "a.json"
    edge = {"source": 1, "target": 1, "weight": -1}
    links.write_text(json.dumps({"nodes": [{"id": 1}], "links": [edge]}))
    for words, message in [
        (["sssp", str(path), "--source", "1"], f"{path}:2: expects a weight of 0 or"),
        (["bfs", str(path), "--source", "9"], "--source expects nodes of the file"),
        (["bfs", str(path)], "bfs expects --source NODE"),
        (["bfs", str(path), "--weighted"], "--weighted is not for bfs"),
        (["components", str(path), "--nodes", "3"], "numbered 0 to 2, got '3'"),
        (["components", str(path), "--out", "x.txt"], "--out: expects .npz, .tsv"),
        (["components", str(packed)], "the end of compressed data that is cut off"),
        (["components", str(arrays)], "edge_index: expects nodes 0 to 1, got [1, -5]"),
        (["components", str(path), "--out", str(path.parent / "b/c.tsv")], "directory"),
        (["components", str(arrays), "--out", str(arrays)], "another file than the"),
        (
            ["components", str(links), "--nodes", "9"],
            "expects no --nodes: the file has",
        ),
        (
            ["sssp", str(links), "--source", "1"],
            f"{links}: expects weights of 0 or more",
        ),
        (["components", str(tmp_path / "none")], "No such file or directory"),
    ]:
        assert main(["graph", *words]) == 2
        assert message in capsys.readouterr().err


ENDS = np.array([[0, 1], [1, 2]])
BAD_ARRAYS = [
    ({"edge_index": np.array([[0], [2**63]], np.uint64)}, "at most 63 bits, got 922"),
    ({"edge_index": np.array([[0], [2**40]])}, "1,099,511,627,777 nodes need"),
    ({"edge_index": ENDS * 0.5}, "edge_index: expects integers, got float64"),
    ({"edge_index": ENDS, "num_nodes": -3}, "expects a number of nodes, got -3"),
    ({"edge_index": ENDS, "shape": "abc"}, "expects a number of nodes, got 'abc'"),
    ({"row": np.arange(2), "col": np.arange(3)}, "row, col: expects one length"),
    ({"indptr": [1, 2], "indices": [0, 1]}, "indptr: expects ascending numbers"),
    ({"indptr": [0, 9, 2], "indices": [0, 1]}, "ascending numbers from 0 to 2, got"),
    ({"indptr": [[0]], "indices": [0]}, "indptr: expects two lists"),
    ({"indptr": [0, 1], "indices": [0], "shape": [2, 2]}, "3 numbers for 2 nodes, got"),
    ({"indptr": [0], "indices": [], "format": "bsr"}, "expects entries, got blocks"),
]


@pytest.mark.parametrize(("arrays", "message"), BAD_ARRAYS)
def test_bad_arrays(
    arrays: dict[str, Any],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, **arrays)
    assert main(["graph", "components", str(path)]) == 2
    told = capsys.readouterr().err
    assert f"ssdtrain graph: {path}: " in told and message in told


@pytest.mark.parametrize(
    "form", [np.uint64, np.uint8, ">i8", "<i4"], ids=lambda f: np.dtype(f).str
)
def test_numbers_of_every_width(form: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    weights = np.array([2, 3], np.dtype(form).newbyteorder(">"))
    np.savez(path, edge_index=ENDS.astype(form), edge_weight=weights)
    found = read_graph(path, weighted=True).graph
    assert found.weights is not None and found.weights.tolist() == [2, 3]
    assert found.neighbors.tolist() == [1, 2]


def test_damaged_files_are_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cut or overwritten anywhere: an answer, or an error with the file's name."""
    # A wrong byte may be a node of a large number: this much memory there is.
    few = MemoryLimits(
        available_bytes=10**6, cgroup_free_bytes=None, memlock_bytes=None
    )
    monkeypatch.setattr(files, "read_limits", lambda: few)
    whole = tmp_path / "whole.npy"
    np.save(whole, ENDS)
    data, path = whole.read_bytes(), tmp_path / "a.npy"
    for at in range(0, len(data), 7):
        for damaged in (data[:at], data[:at] + b"(" + data[at + 1 :]):
            path.write_bytes(damaged)
            status = main(["graph", "components", str(path), "--json"])
            assert status == 0 or str(path) in capsys.readouterr().err
    packed = tmp_path / "a.txt.bz2"
    packed.write_bytes(b"BZh9" + bytes(40))
    assert main(["graph", "components", str(packed)]) == 2
    assert f"{packed}:0: expects more lines" in capsys.readouterr().err


def test_the_line_where_packed_lines_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"0 1\n" * 1000)[:-4])
    assert main(["graph", "components", str(path)]) == 2
    assert f"{path}:1000: expects more lines" in capsys.readouterr().err


def test_an_earlier_result_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the new one cannot be written, and no part of it lies about."""
    path, out = tmp_path / "a.txt", tmp_path / "out.npz"
    path.write_text(LINES)
    out.write_text("earlier")

    def full(path: str, **columns: object) -> None:
        Path(path).write_text("half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", full)
        assert main(["graph", "components", str(path), "--out", str(out)]) == 2
    assert out.read_text() == "earlier"
    assert sorted(tmp_path.iterdir()) == [path, out]
    assert main(["graph", "components", str(path), "--out", str(out)]) == 0
    with np.load(out) as result:
        assert result.files == ["node", "component"]


def test_parts_of_an_entry_are_one_edge(tmp_path: Path) -> None:
    """As in scipy: in files of coordinates, of lists, and of Matrix Market."""
    parts = ([2.0, 3.0, 1.0], ([1, 1, 0], [0, 0, 1]))
    whole = scipy.sparse.coo_array(parts, shape=(3, 3))
    lists = scipy.sparse.csr_array(([1.0, 2.0, 3.0], [1, 0, 0], [0, 1, 3, 3]))
    lists.resize(3, 3)
    for name, matrix in (("a.npz", whole), ("b.npz", lists)):
        scipy.sparse.save_npz(tmp_path / name, matrix)
    text = "1 2 1\n2 1 2\n2 1 3\n"
    (tmp_path / "c.MTX").write_text(MATRIX.replace("3 3 2", "3 3 3") + text)
    for path in tmp_path.iterdir():
        found = read_graph(path, weighted=True).graph
        assert found.offsets.tolist() == [0, 1, 2, 2]
        assert found.weights is not None and found.weights.tolist() == [1, 5]
        assert read_graph(path).graph.neighbors.tolist() == [1, 0]


def test_two_weights_there_and_back(tmp_path: Path) -> None:
    """Undirected, both edges stay, as of lines."""
    path = tmp_path / "a.json"
    made = networkx.DiGraph([(1, 0, {"weight": 9}), (0, 1, {"weight": 2})])
    path.write_text(json.dumps(networkx.node_link_data(made, edges="edges")))
    found = read_graph(path, weighted=True, undirected=True)
    assert sssp(found.graph, found.nodes(["1"])[0]).tolist() == [0, 2]


def test_lines_end_as_every_system_ends_them(tmp_path: Path) -> None:
    for end in ("\n", "\r\n", "\r"):
        path = tmp_path / "a.txt"
        path.write_bytes(f"\ufeff0 1{end}1 2{end}".encode())
        assert read_graph(path).graph.neighbors.tolist() == [1, 2]


def test_an_empty_file_has_weights_too(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("source,target,weight\n")
    assert main(["graph", "pagerank", str(path), "--weighted"]) == 0
