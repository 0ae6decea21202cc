"""The trainer: configs, learning, metrics, checkpoints, resuming."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import Tensor, nn

from hector.datasets.generate import TABLE_3_3, scaled
from hector.datasets.task import generated_task
from hector.graph import HeteroGraph
from hector.train import (
    DataConfig,
    LayerKind,
    LayerSpec,
    ModelConfig,
    NodeClassificationTrainer,
    OptimizerConfig,
    RunConfig,
)
from hector.train.checkpoint import CheckpointMismatchError
from hector.train.config import MESSAGE_KINDS

CONFIGS = Path(__file__).resolve().parents[3] / "configs"


class SumLayer(nn.Module):
    """A relational layer in five lines, so that these tests need no compiler."""

    def __init__(self, spec: LayerSpec, graph: HeteroGraph) -> None:
        super().__init__()
        self.relation = nn.Parameter(
            torch.randn(graph.num_edge_types, spec.out_channels) / 4
        )
        self.lin = nn.Linear(spec.in_channels, spec.out_channels)

    def forward(self, x: Tensor, graph: HeteroGraph) -> Tensor:
        out: Tensor = self.lin(x)
        message = out[graph.src] * 0.1 + self.relation[graph.edge_type]
        return out.index_add(0, graph.dst, message)


def make(epochs: int = 12, **changes: Any) -> NodeClassificationTrainer:
    run = RunConfig(device="cpu", progress=False, **changes)
    return NodeClassificationTrainer(
        model=ModelConfig(layer="rgcn", hidden_channels=8, dropout=0.2),
        data=DataConfig(name="aifb", scale=0.05, num_labelled=120),
        optimizer=OptimizerConfig(learning_rate=0.05),
        run=run,
        epochs=epochs,
        make_layer=SumLayer,
    )


def compose_gnn(choice: str, *overrides: str) -> Any:
    GlobalHydra.instance().clear()
    with initialize_config_dir(config_dir=str(CONFIGS), version_base="1.3"):
        return compose(overrides=[f"+gnn={choice}", *overrides])


def config_of(kind: str) -> str:
    """The choice of the group gnn for a layer; others are PyG's."""
    return f"message_{kind}" if LayerKind(kind) in MESSAGE_KINDS else kind


@pytest.mark.parametrize("kind", [k.value for k in LayerKind])
def test_config_builds_the_trainer(kind: str) -> None:
    more = ["trainer.run.num_seeds=3", "trainer.data.scale=0.1"]
    config = compose_gnn(config_of(kind), *more)
    trainer = instantiate(config.trainer)
    assert isinstance(trainer, NodeClassificationTrainer)
    assert trainer.model_config.layer is LayerKind(kind)
    assert trainer.run_config.num_seeds == 3
    model = trainer.build_model(trainer.task(), 0)
    names = {type(layer).__name__.lower() for layer in model.layers}
    relational = config_of(kind) == kind
    assert names == {f"{kind}conv" if relational else "messagelayer"}
    assert trainer.run_config.output_directory is None


@pytest.mark.parametrize("kind", [k.value for k in LayerKind])
def test_config_replaces_the_roots_trainer(kind: str) -> None:
    root = OmegaConf.create(
        {"trainer": {"_target_": "other"}, "run_directory": "runs/x"}
    )
    trainer = instantiate(OmegaConf.merge(root, compose_gnn(config_of(kind))).trainer)
    assert trainer.run_config.output_directory == "runs/x"


def test_unknown_keys_fail() -> None:
    with pytest.raises(Exception, match="hidden"):
        compose_gnn("rgcn", "trainer.model.hidden=3")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ModelConfig(layer="gcn"), "'gcn' is not a valid LayerKind"),
        (lambda: ModelConfig(layer="rgat", heads=3), "divisible by heads = 3, got 16"),
        (lambda: ModelConfig(layer="rgcn", heads=2), "heads=1 for rgcn"),
        (lambda: ModelConfig(layer="hgt", num_bases=2), "num_bases=null for hgt"),
        (lambda: ModelConfig(layer="rgat", dropout=1.0), r"dropout in \[0, 1\)"),
        (lambda: make(epochs=0), "epochs of at least 1"),
        (lambda: OptimizerConfig(learning_rate=0), "learning_rate > 0"),
        (lambda: RunConfig(num_seeds=0), "num_seeds >= 1"),
        (lambda: RunConfig(checkpoint_epochs=2), "expected output_directory with"),
        (lambda: make(dtype="int8"), "dtype in .* got 'int8'"),
        (lambda: make(resume="must").run(), "expected a checkpoint at None"),
    ],
)
def test_errors_teach(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_no_such_graph() -> None:
    trainer = make()
    trainer.data = DataConfig(name="cora")
    with pytest.raises(ValueError, match=r"data\.name in .*got 'cora'; set data\.dir"):
        trainer.run()


def test_generated_labels_are_learnt(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trainer = make(60, num_seeds=2, output_directory=str(tmp_path))
    trainer.optimizer_config = OptimizerConfig(learning_rate=0.05, weight_decay=1e-2)
    trainer.data = DataConfig(name="mutag", scale=0.05, num_labelled=800)
    trainer.model_config = ModelConfig(layer="rgcn", hidden_channels=8, num_layers=1)
    result = trainer.run()
    assert result["mean_accuracy"] > 0.7, "the largest class holds half"
    assert len(result["accuracies"]) == 2
    assert json.loads(json.dumps(result)) == result
    assert "mean and deviation of 2 seeds" in capsys.readouterr().out
    rows = read_metrics(tmp_path)
    assert [(r["seed"], r["epoch"]) for r in rows] == [
        (s, e) for s in (0, 1) for e in range(60)
    ]
    assert rows[-1]["loss"] == result["final_loss"] < rows[60]["loss"] / 2


def test_a_seed_is_a_run() -> None:
    first, same, other = (make(seed=s).train() for s in (4, 4, 5))
    assert first.losses == same.losses != other.losses


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    text = (directory / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


class Stop(Exception):
    """The crash of a test."""


@pytest.mark.parametrize("crash_at", [5, 17])
def test_a_resumed_run_is_the_run_that_never_stopped(
    tmp_path: Path, crash_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make(num_seeds=2, output_directory=str(tmp_path / "whole")).train()
    options = {"output_directory": str(tmp_path / "cut"), "checkpoint_epochs": 2}
    crashing = make(num_seeds=2, **options)
    count = iter(range(100))
    inner = SumLayer.forward

    def failing(self: SumLayer, x: Tensor, graph: HeteroGraph) -> Tensor:
        if next(count) == 2 * crash_at:
            raise Stop
        return inner(self, x, graph)

    with monkeypatch.context() as patch:
        patch.setattr(SumLayer, "forward", failing)
        with pytest.raises(Stop):
            crashing.train()
    resumed = make(num_seeds=2, resume="must", **options).train()
    assert resumed.accuracies == whole.accuracies
    assert resumed.losses == whole.losses[-len(resumed.losses) :]
    assert len(resumed.losses) < 24
    rows = read_metrics(tmp_path / "cut")
    assert [(r["seed"], r["epoch"]) for r in rows] == [
        (s, e) for s in (0, 1) for e in range(12)
    ]
    assert [r["loss"] for r in rows[12:]] == list(whole.losses)


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    options = {"output_directory": str(tmp_path), "checkpoint_epochs": 6}
    make(**options).train()
    with pytest.raises(CheckpointMismatchError, match=r"run\.seed: 0 there, 1 here"):
        make(seed=1, **options).train()
    make(seed=1, resume="never", **options).train()
    done = make(seed=1, **options).train()
    assert (done.losses, done.epoch_ms) == ((), None)
    assert str(done).endswith(" % (one seed)")
    assert not list(tmp_path.glob("*.part"))


def test_a_run_of_one_repetition_goes_on_beyond_its_end(tmp_path: Path) -> None:
    whole = make(8).train()
    options = {"output_directory": str(tmp_path), "checkpoint_epochs": 2}
    make(5, **options).train()  # the last epoch is saved, too
    longer = make(8, resume="must", **options).train()
    assert longer.losses == whole.losses[5:]
    assert longer.accuracies == whole.accuracies
    with pytest.raises(CheckpointMismatchError, match="epochs: None there, 9 here"):
        make(9, num_seeds=2, **options).train()


def test_generated_task_splits_labels() -> None:
    spec = scaled(TABLE_3_3["mutag"], 0.02)
    task = generated_task(spec, num_classes=3, num_labelled=50)
    assert (task.train_nodes.numel(), task.test_nodes.numel()) == (40, 10)
    both = torch.cat([task.train_nodes, task.test_nodes])
    assert both.unique().numel() == 50
    assert int(task.train_labels.max()) < 3
    assert bool((task.graph.csc().ptr.diff()[both] > 0).all())
    with pytest.raises(ValueError, match=r"num_labelled in \[2, "):
        generated_task(spec, num_classes=3, num_labelled=10**6)
    with pytest.raises(ValueError, match="num_classes >= 2"):
        generated_task(spec, num_classes=1, num_labelled=5)
    assert replace(task, name="x").name == "x"
