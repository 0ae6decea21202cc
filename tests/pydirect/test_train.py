"""The node classification trainer: learns, repeats, resumes, fetches alike."""

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from pydirect.datasets import NodeDataset, load
from pydirect.loader import LoaderConfig
from pydirect.tiering import Score, score_nodes, spread
from pydirect.train import NodeClassificationTrainer
from ssdtrain.tools.cli import main

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "../shared/data/planetoid"
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def trainer_of(
    pyg: ModuleType, dataset: NodeDataset, **changes: Any
) -> NodeClassificationTrainer:
    def model(in_channels: int, out_channels: int) -> torch.nn.Module:
        sage: torch.nn.Module = pyg.nn.GraphSAGE(
            in_channels, 32, 2, out_channels, dropout=0.2
        )
        return sage

    settings: dict[str, Any] = {
        "model": model,
        "loader": LoaderConfig(batch_size=128, fanouts=(5, 5), num_samplers=2),
        "epochs": 4,
        "progress": False,
        "device": "cpu",
        "optimizer": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    }
    return NodeClassificationTrainer(dataset=dataset, **{**settings, **changes})


def test_it_learns_and_both_fetches_agree(
    pyg: ModuleType, dataset: NodeDataset
) -> None:
    direct = trainer_of(pyg, dataset, fetch="direct").fit()
    staged = trainer_of(pyg, dataset, fetch="staged").fit()
    assert direct.losses == staged.losses
    assert direct.test_accuracy == staged.test_accuracy
    assert direct.losses[-1] < 0.5 * direct.losses[0]
    assert direct.test_accuracy > 0.8


@pytest.mark.parametrize("capture", [False, True])
def test_rows_of_other_types_train_as_the_weights_are(
    pyg: ModuleType, dataset: NodeDataset, capture: bool
) -> None:
    halved = dataset.features.half()
    found = []
    for rows in (halved, halved.float(), halved.double()):
        given = replace(dataset, features=rows)
        found.append(trainer_of(pyg, given, epochs=2, capture=capture).fit().losses)
    assert found[0] == found[1] == found[2]


def test_a_cache_without_its_use(pyg: ModuleType, dataset: NodeDataset) -> None:
    for fetch, cache, message in (
        (
            "direct",
            8,
            "cache_bytes: expects null where features.place is direct, got 8",
        ),
        ("tiered", -1, "features.cache_bytes: expects 0 or more, got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            trainer_of(pyg, dataset, fetch=fetch, cache_bytes=cache)


@pytest.mark.parametrize("score", ["degree", "weighted_reverse_pagerank"])
def test_hot_rows_near_change_no_loss(
    pyg: ModuleType, dataset: NodeDataset, score: str
) -> None:
    direct = trainer_of(pyg, dataset, epochs=2).fit()
    trainer = trainer_of(
        pyg, dataset, epochs=2, fetch="tiered", score=score, cache_bytes=150 * 64
    )
    tiered = trainer.fit()
    assert tiered.losses == direct.losses
    assert trainer.tiered_table.num_near == 150
    # Hot rows are asked for more often than rows drawn at random.
    assert trainer.tiered_table.hit_ratio() > 0.15


def test_the_cache_takes_what_is_free(
    pyg: ModuleType, dataset: NodeDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spread, "free_budget_bytes", lambda device: 77 * 64 + 63)
    table = trainer_of(pyg, dataset, fetch="tiered").tiered_table
    assert table.num_near == 77
    score = score_nodes(
        Score.WEIGHTED_REVERSE_PAGERANK, dataset.graph, dataset.train_nodes, num_hops=2
    )
    table.index_select(score.argsort(descending=True, stable=True)[:77])
    assert table.hit_ratio() == 1.0


def test_resume_continues_as_if_never_stopped(
    pyg: ModuleType, dataset: NodeDataset, tmp_path: Path
) -> None:
    whole = trainer_of(pyg, dataset, epochs=4).fit()
    directory = str(tmp_path / "run")
    trainer_of(pyg, dataset, epochs=2, run_directory=directory).fit()
    resumed = trainer_of(
        pyg, dataset, epochs=4, run_directory=directory, resume=True
    ).fit()
    assert resumed.losses == whole.losses  # those before the checkpoint, too
    assert resumed.epoch_seconds > 0
    assert resumed.test_accuracy == whole.test_accuracy
    text = (tmp_path / "run/metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    epochs = [line["epoch"] for line in lines if "epoch" in line]
    assert epochs == [0, 1, 2, 3]
    assert lines[-1]["test"] == whole.test_accuracy


def test_settings_are_checked(pyg: ModuleType, dataset: NodeDataset) -> None:
    with pytest.raises(ValueError, match="expects run_directory"):
        trainer_of(pyg, dataset, resume=True)
    with pytest.raises(ValueError, match="not a valid FetchMode"):
        trainer_of(pyg, dataset, fetch="teleport")
    with pytest.raises(ValueError, match="device_bytes: expects a GPU"):
        trainer_of(pyg, dataset, device_bytes=1 << 20)
    with pytest.raises(ValueError, match=r"cora\.npz"):
        load("cora", directory="/nonexistent")
    with pytest.raises(ValueError, match=r"trainer\.dataset\.directory"):
        load("cora")


@pytest.mark.parametrize("name", ["graphsage", "gat"])
def test_the_configs_work_alone(name: str, pyg: ModuleType) -> None:
    from hydra import compose, initialize_config_dir
    from hydra.utils import instantiate

    from ssdtrain.train.compose import compose_config

    small = [
        "trainer.epochs=1",
        "trainer.device=cpu",
        "trainer.progress=false",
        "trainer.dataset.statistics.num_nodes=600",
        "trainer.dataset.statistics.num_edges=3000",
    ]
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        config = compose(f"gnn/{name}", overrides=small)
    root = compose_config("ssdtrain.yaml", [f"gnn={name}", *small])
    result = instantiate(config.trainer).run()
    assert result["losses"][0] > 0 and 0 <= result["test_accuracy"] <= 1
    assert root.trainer._target_ == "pydirect.train.NodeClassificationTrainer"


def test_cora_reaches_its_known_accuracy(pyg: ModuleType) -> None:
    if not (DATA / "cora.npz").is_file():
        pytest.skip("cora.npz is not beside this checkout")
    cora = load("cora", directory=str(DATA))
    assert (cora.graph.num_nodes, cora.graph.num_edges) == (2708, 10556)
    assert (cora.num_features, cora.num_classes) == (1433, 7)
    result = trainer_of(
        pyg,
        cora,
        epochs=30,
        loader=LoaderConfig(batch_size=140, fanouts=(25, 10), num_samplers=2),
        optimizer=lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=5e-4),
    ).fit()
    assert result.test_accuracy > 0.74


def test_generated_splits_are_apart(dataset: NodeDataset) -> None:
    parts = [dataset.train_nodes, dataset.valid_nodes, dataset.test_nodes]
    assert [len(part) for part in parts] == [450, 90, 90]
    assert len(torch.cat(parts).unique()) == 630


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trainer.dataset.name=none"], "expects trainer.dataset.directory"),
        (["trainer.dataset.statistics.num_nodes=1"], "at least num_classes"),
        (["trainer.dataset.statistics.train_share=2"], "more than 0 and less than 1"),
        (["trainer.model.hidden_channels=a"], "hidden_channels expects an integer"),
        (["trainer.model.num_layers=3"], "for each of the model's 3 layers"),
        (["trainer.loader.seed=x"], "trainer.loader.seed expects an integer"),
        (["trainer.loader.fanouts=5"], "trainer.loader.fanouts expects a list"),
        (["trainer.fetch=foo"], "'tiered' or 'peers' or 'device', got 'foo'"),
        (["trainer.device=meta"], "got 'meta'"),
        (["trainer.epochs=0"], "epochs: expects 1 or more"),
        (["trainer.run_directory=/proc/x"], "run_directory: expects a place"),
        (["trainer.dataset=null"], "trainer.dataset expects NodeDataset"),
    ],
)
def test_what_cannot_be_prepared_is_told_and_leaves_nothing(
    words: list[str],
    message: str,
    pyg: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = ("num_nodes=200", "num_edges=400", "num_features=4", "num_classes=2")
    few = [f"trainer.dataset.statistics.{one}" for one in small]
    monkeypatch.chdir(tmp_path)
    assert main(["train", "-q", "gnn=graphsage", *few, *words]) == 2
    *_, line = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("ssdtrain: ") and message in line
    assert [*(tmp_path / "runs").iterdir()] == []
