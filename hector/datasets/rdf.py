"""Entity classification on RDF graphs: AIFB and MUTAG from a given directory.

The directory holds one N-Triples file and `trainingSet.tsv`, `testSet.tsv` with a
header (columns in any order), as the R-GCN authors publish them. Nothing is
downloaded.
"""

import csv
from dataclasses import dataclass
from pathlib import Path

import torch

from hector.datasets.task import NodeClassification
from hector.datasets.triples import number, open_text, parse_ntriples


@dataclass(frozen=True, kw_only=True)
class RdfTask:
    """What is classified in an RDF graph, and by which column of the label files."""

    entity_column: str
    label_column: str
    target_relations: tuple[str, ...]
    """Relations that state the label; their triples are left out of the graph."""


# Relations as in Ristoski et al., 2016, and the R-GCN paper.
RDF_TASKS = {
    "aifb": RdfTask(
        entity_column="person",
        label_column="label_affiliation",
        target_relations=(
            "http://swrc.ontoware.org/ontology#affiliation",
            "http://swrc.ontoware.org/ontology#employs",
        ),
    ),
    "mutag": RdfTask(
        entity_column="bond",
        label_column="label_mutagenic",
        target_relations=("http://dl-learner.org/carcinogenesis#isMutagenic",),
    ),
}


def load_rdf(name: str, directory: str | Path) -> NodeClassification:
    """AIFB or MUTAG with inverse relations and without the target relations.

    `name` is a key of RDF_TASKS. Raises FileNotFoundError naming the missing file,
    and ValueError when a labelled entity is not in the graph.
    """
    if name not in RDF_TASKS:
        raise ValueError(f"expected name in {sorted(RDF_TASKS)}, got {name!r}")
    task, directory = RDF_TASKS[name], Path(directory)
    triples = number(
        t
        for t in parse_ntriples(_triple_file(directory))
        if t[1] not in task.target_relations
    )
    ids = {entity: i for i, entity in enumerate(triples.entities)}
    split = {
        part: _labels(directory / f"{part}.tsv", task)
        for part in ("trainingSet", "testSet")
    }
    classes = sorted({label for rows in split.values() for _, label in rows})
    nodes, labels = {}, {}
    for part, rows in split.items():
        missing = [entity for entity, _ in rows if entity not in ids]
        if missing:
            raise ValueError(
                f"expected every entity of {part}.tsv in the graph of "
                f"{_triple_file(directory).name}, got "
                f"{missing[0]!r} ({len(missing)} of {len(rows)} missing)"
            )
        nodes[part] = torch.tensor([ids[entity] for entity, _ in rows], device="cpu")
        labels[part] = torch.tensor(
            [classes.index(label) for _, label in rows], device="cpu"
        )
    return NodeClassification(
        name=name,
        graph=triples.to_graph(),
        num_classes=len(classes),
        train_nodes=nodes["trainingSet"],
        train_labels=labels["trainingSet"],
        test_nodes=nodes["testSet"],
        test_labels=labels["testSet"],
    )


def _triple_file(directory: Path) -> Path:
    found = sorted(p for p in directory.glob("*.nt*") if p.is_file())
    if len(found) != 1:
        raise FileNotFoundError(
            f"expected one .nt, .nt.gz or .nt.xz file in {directory}, got "
            f"{[p.name for p in found]}"
        )
    return found[0]


def _labels(path: Path, task: RdfTask) -> list[tuple[str, str]]:
    """(entity, label) rows, the columns found by name."""
    with open_text(path) as file:
        try:
            rows = list(csv.DictReader(file, delimiter="\t"))
        except csv.Error as error:
            raise ValueError(
                f"expected a tab-separated table in {path}: {error}"
            ) from error
    columns = (task.entity_column, task.label_column)
    seen: set[str] = set()
    for line, row in enumerate(rows, 2):
        for column in columns:
            if not row.get(column):
                found = sorted(map(str, row))
                raise ValueError(
                    f"expected a value of {column!r} at {path}:{line}, got {found}"
                )
        entity = row[task.entity_column]
        if entity in seen:
            raise ValueError(
                f"expected each entity once, got {entity!r} again at {path}:{line}"
            )
        seen.add(entity)
    if not rows:
        raise ValueError(f"expected rows with {' and '.join(columns)} in {path}")
    return [(row[columns[0]], row[columns[1]]) for row in rows]
