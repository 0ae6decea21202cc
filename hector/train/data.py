"""From a data config to a graph with labels."""

from collections.abc import Callable

from hector.datasets.generate import TABLE_3_3, scaled
from hector.datasets.knowledge import load_fb15k_237, load_ogbn_mag_small
from hector.datasets.rdf import load_rdf
from hector.datasets.task import NodeClassification, generated_task, labelled_task
from hector.datasets.trees import EXPRESSIONS, expressions
from hector.graph import HeteroGraph
from hector.train.config import DataConfig

_GRAPHS: dict[str, Callable[[str], HeteroGraph]] = {
    "mag": load_ogbn_mag_small,
    "fb15k-237": load_fb15k_237,
}
"""Graphs of files that have no labels of their own."""


def load_data(config: DataConfig, seed: int) -> NodeClassification:
    """The data set in `config.directory`, or a generated graph of its size."""
    if config.directory is not None and config.name in _GRAPHS:
        return labelled_task(
            config.name,
            _GRAPHS[config.name](config.directory),
            num_classes=config.num_classes,
            num_labelled=config.num_labelled,
            seed=seed,
        )
    if config.directory is not None:
        return load_rdf(config.name, config.directory)
    if config.name == EXPRESSIONS:
        return expressions(round(200 * config.scale), seed=seed)
    if config.name not in TABLE_3_3:
        raise ValueError(
            f"expected data.name in {sorted([*TABLE_3_3, EXPRESSIONS])} for a "
            f"generated graph, got {config.name!r}; set data.directory to read files"
        )
    return generated_task(
        scaled(TABLE_3_3[config.name], config.scale),
        num_classes=config.num_classes,
        num_labelled=config.num_labelled,
        seed=seed,
    )
