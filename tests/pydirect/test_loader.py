"""Batches of the loader: right rows, in order, whatever overlaps."""

import threading

import pytest
import torch

from pydirect.loader import (
    DirectFetch,
    Fetch,
    LoaderConfig,
    MiniBatchLoader,
    StagedFetch,
)
from pydirect.sampling import Graph, GraphStatistics, generate_graph

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GRAPH, LABELS = generate_graph(
    GraphStatistics(num_nodes=300, num_edges=2000, num_classes=4), seed=0
)
SEEDS = torch.arange(100)
FEATURES = torch.arange(300.0)[:, None] * torch.ones(1, 8)


def loader_of(
    buffers: int,
    fetch: Fetch | None = None,
    sampling: str = "threads",
    seeds: torch.Tensor | None = None,
) -> MiniBatchLoader:
    config = LoaderConfig(
        batch_size=32,
        fanouts=(4, 3),
        num_samplers=3,
        num_buffers=buffers,
        seed=7,
        sampling=sampling,
    )
    fetch = fetch or StagedFetch(FEATURES, DEVICE)
    seeds = torch.arange(250) if seeds is None else seeds
    return MiniBatchLoader(GRAPH, LABELS, seeds, fetch, config, DEVICE)


def test_rows_labels_and_edges_belong_together() -> None:
    loader = loader_of(2, DirectFetch(FEATURES, DEVICE, num_slots=2))
    plain = loader_of(1)
    seen = 0
    for batch, sampled in zip(loader, plain.sampled(), strict=True):
        ids = sampled.node_ids
        assert torch.equal(batch.x.cpu()[:, 0], ids.float())
        assert torch.equal(batch.edge_index.cpu(), sampled.edge_index)
        assert torch.equal(batch.y.cpu(), LABELS[ids[: batch.num_seeds]])
        seen += batch.num_seeds
    assert seen == 250 and len(loader) == 8


@pytest.mark.parametrize("sampling", ["threads", "device", "host"])
@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_overlap_changes_nothing(buffers: int, sampling: str) -> None:
    want = [b.x.clone() for b in loader_of(1, sampling=sampling)]
    fetch = DirectFetch(FEATURES, DEVICE, num_slots=buffers)
    got = [b.x.clone() for b in loader_of(buffers, fetch, sampling)]
    assert len(got) == len(want)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_epochs_differ_and_repeat() -> None:
    loader = loader_of(2)
    first = [b.x[:, 0].clone() for b in loader]
    second = [b.x[:, 0].clone() for b in loader]
    assert loader.epoch == 2
    loader.epoch = 0
    again = [b.x[:, 0].clone() for b in loader]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(
        a.shape == b.shape and torch.equal(a, b)
        for a, b in zip(first, second, strict=True)
    )


@pytest.mark.parametrize("sampling", ["threads", "device"])
@pytest.mark.parametrize("num_batches", [1, 7])
def test_leaving_early_stops_the_threads(num_batches: int, sampling: str) -> None:
    before = set(threading.enumerate())
    threads = torch.get_num_threads()
    loader = loader_of(2, sampling=sampling)
    for number, _ in enumerate(loader, 1):
        if number == num_batches:
            break
    assert loader.epoch == 1
    assert set(threading.enumerate()) <= before
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("sampling", ["threads", "device"])
def test_an_error_in_the_fetching_thread_reaches_the_caller(sampling: str) -> None:
    before = set(threading.enumerate())
    too_small = StagedFetch(FEATURES[:10], DEVICE)
    with pytest.raises(IndexError):
        list(loader_of(2, too_small, sampling))
    assert set(threading.enumerate()) <= before


def test_an_error_in_the_drawing_thread_reaches_the_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(seed: int, batch: int) -> int:
        raise ValueError(f"no batch {batch}")

    monkeypatch.setattr("pydirect.sampling.philox.key_of", refuse)
    before = set(threading.enumerate())
    with pytest.raises(ValueError, match="no batch 0"):
        list(loader_of(2, sampling="device"))
    assert set(threading.enumerate()) <= before


def test_isolated_nodes_and_no_seeds() -> None:
    lonely = Graph.from_edges(torch.empty(2, 0, dtype=torch.long), 5)
    config = LoaderConfig(batch_size=2, fanouts=(3,), num_samplers=1)
    fetch = StagedFetch(FEATURES, DEVICE)
    for seeds, batches in ((torch.arange(5), 3), (torch.arange(0), 0)):
        loader = MiniBatchLoader(lonely, LABELS, seeds, fetch, config, DEVICE)
        assert len([b for b in loader if b.num_seeds]) == batches


def test_settings_are_checked() -> None:
    with pytest.raises(
        ValueError, match="num_buffers: expects an integer of 1 or more"
    ):
        LoaderConfig(num_buffers=0)
    with pytest.raises(ValueError, match=r"max_sms: expects at least 1.* got 0"):
        LoaderConfig(max_sms=0)
    with pytest.raises(ValueError, match=r"max_sms: expects .* got many"):
        LoaderConfig(max_sms="many")
    assert LoaderConfig(max_sms="auto").fixed_sms is None
    assert LoaderConfig(max_sms=3).fixed_sms == 3
    assert loader_of(2).explain() == "max_sms 16 (set)"


@pytest.mark.parametrize("sampling", ["threads", "device"])
def test_seeds_of_any_size(sampling: str) -> None:
    orders = []
    for seed in (20_261_123, -7, 2**70):
        config = LoaderConfig(
            batch_size=64, fanouts=(2,), num_samplers=1, sampling=sampling, seed=seed
        )
        fetch = DirectFetch(FEATURES, DEVICE, num_slots=2)
        loader = MiniBatchLoader(GRAPH, LABELS, SEEDS, fetch, config, DEVICE)
        orders.append([b.x[:, 0].tolist() for b in loader])
    assert orders[0] != orders[1] != orders[2]
