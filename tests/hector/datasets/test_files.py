"""AIFB, MUTAG, FB15k-237 and the small ogbn-mag: by hand-made files, and by the real
ones where they are found."""

from pathlib import Path

import pytest
import torch

from hector.datasets.knowledge import load_fb15k_237, load_ogbn_mag_small
from hector.datasets.rdf import load_rdf
from hector.statistics import statistics

DATA = Path(__file__).resolve().parents[3] / "../shared/data"


def real(name: str) -> Path:
    if not (DATA / name).is_dir():
        pytest.skip(f"no {name} data on this machine")
    return DATA / name


def write_rdf(directory: Path, test_entity: str = "http://p2") -> None:
    affiliation = "http://swrc.ontoware.org/ontology#affiliation"
    (directory / "g.nt").write_text(
        "<http://p1> <http://knows> <http://p2> .\n"
        f"<http://p1> <{affiliation}> <http://g1> .\n"
        "<http://p2> <http://knows> <http://p3> .\n"
    )
    (directory / "trainingSet.tsv").write_text(
        "person\tid\tlabel_affiliation\nhttp://p1\t1\tB\nhttp://p3\t2\tA\n"
    )
    (directory / "testSet.tsv").write_text(
        f"id\tlabel_affiliation\tperson\n9\tB\t{test_entity}\n"
    )


def test_labels_are_split_and_the_target_relation_is_gone(tmp_path: Path) -> None:
    write_rdf(tmp_path)
    task = load_rdf("aifb", tmp_path)
    assert (task.graph.num_edges, task.graph.num_edge_types) == (4, 2)
    assert task.graph.num_nodes == 3, "the group is known by its label alone"
    assert task.train_nodes.tolist() == [0, 2]
    assert task.train_labels.tolist() == [1, 0]
    assert (task.test_nodes.tolist(), task.test_labels.tolist()) == ([1], [1])
    assert task.num_classes == 2
    assert task.to("cpu").graph is task.graph


def test_errors_name_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"name in \['aifb', 'mutag'\], got 'am'"):
        load_rdf("am", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"one \.nt.* got \[\]"):
        load_rdf("aifb", tmp_path)
    write_rdf(tmp_path, test_entity="http://nobody")
    with pytest.raises(ValueError, match=r"testSet\.tsv in the graph.*nobody.*1 of 1"):
        load_rdf("aifb", tmp_path)
    (tmp_path / "testSet.tsv").write_text("id\tperson\n1\thttp://p1\n")
    with pytest.raises(ValueError, match="expected a value of 'label_affiliation'"):
        load_rdf("aifb", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"train\.txt"):
        load_fb15k_237(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"citing_coo_2\.npy"):
        load_ogbn_mag_small(tmp_path)


@pytest.mark.parametrize(
    ("name", "nodes", "edges", "relations", "split", "classes"),
    [
        ("aifb", 2_835, 40_676, 44, (140, 36), 4),
        ("mutag", 23_644, 148_454, 46, (272, 68), 2),
    ],
)
def test_real_rdf(
    name: str,
    nodes: int,
    edges: int,
    relations: int,
    split: tuple[int, int],
    classes: int,
) -> None:
    task = load_rdf(name, real(name))
    graph = task.graph
    assert (graph.num_nodes, graph.num_edges) == (nodes, edges)
    assert graph.num_edge_types == relations
    assert (task.train_nodes.numel(), task.test_nodes.numel()) == split
    assert task.num_classes == classes
    train, test = set(task.train_nodes.tolist()), set(task.test_nodes.tolist())
    assert not train & test


def test_fb15k_237_has_the_seeds_compaction_ratio() -> None:
    graph = load_fb15k_237(real("fb15k-237"))
    found = statistics(graph)
    assert (found.num_nodes, found.num_edges) == (14_541, 620_232)
    assert (found.num_edge_types, found.num_empty_relations) == (474, 0)
    assert round(found.entity_compaction_ratio, 2) == 0.26


def test_ogbn_mag_small_types() -> None:
    graph = load_ogbn_mag_small(real("ogbn-mag-0.1"))
    assert graph.num_edges == 2 * 172_586
    names = graph.edge_type_metadata()
    assert names[4] == ("paper", "rev_writing", "author")
    # Stated names agree with the node types that the edges touch.
    assert graph.replace(edge_type_names=None).edge_type_metadata() == tuple(
        (a, f"r{i}", b) for i, (a, _, b) in enumerate(names)
    )
    assert torch.equal(graph.etype_ptr.diff()[:3], graph.etype_ptr.diff()[3:])
