"""A model's rows by one setting: from files and learned, wherever they lie."""

import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra.utils import instantiate

from hector.train import NodeClassificationTrainer
from tests.hector.train.test_trainer import compose_gnn

SMALL = (
    "trainer.data.scale=0.02",
    "trainer.data.num_labelled=60",
    "trainer.run.device=cpu",
    "trainer.run.progress=false",
    "trainer.epochs=3",
)


def trainer_of(*words: str, gnn: str = "rgat") -> NodeClassificationTrainer:
    made = instantiate(compose_gnn(gnn, *SMALL, *words).trainer)
    assert isinstance(made, NodeClassificationTrainer)
    return made


@pytest.fixture
def rows(tmp_path: Path) -> str:
    """A file of rows for the nodes of the small graph."""
    number = trainer_of().task().graph.num_nodes
    path = tmp_path / "rows.npy"
    np.save(path, np.random.default_rng(0).normal(size=(number, 6)).astype("f4"))
    return str(path)


TIERED = ("features.place=tiered", "features.cache_bytes=700")
PLACES = [("features.place=device",), ("features.place=direct",), TIERED]


@pytest.mark.parametrize("more", [(), ("trainer.batch=16", "trainer.fanouts=[3,3]")])
def test_the_place_of_rows_changes_no_loss(rows: str, more: tuple[str, ...]) -> None:
    found = [
        trainer_of(f"features.source={rows}", *place, *more).train().losses
        for place in PLACES
    ]
    assert found[0] == found[1] == found[2]
    assert found[0][-1] < found[0][0]


def test_embeddings_in_host_memory(tmp_path: Path) -> None:
    """Tiered ones train as those without copies, and a run resumes bit by bit."""
    out = [f"trainer.run.output_directory={tmp_path}"]
    found = [trainer_of(*place).train().losses for place in PLACES[1:]]
    assert found[0] == found[1] and found[0][-1] < found[0][0]
    # The first loss is that of the same first values, wherever they lie.
    assert trainer_of().train().losses[0] == found[0][0]
    trainer_of(
        *TIERED, *out, "trainer.epochs=2", "trainer.run.checkpoint_epochs=2"
    ).run()
    resumed = trainer_of(*TIERED, *out).train()
    assert resumed.losses == found[0][2:]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("features.source=none.npy",), "expects a .npy file, got none.npy"),
        (("features.place=peers",), "device, direct or tiered for embeddings"),
        (("features.cache_bytes=8",), "expects null where features.place is device"),
        (("features.cache_bytes=-8",), "features.cache_bytes: expects 0 or more, got"),
        (("features.source=random", "features.place=peers"), "several ranks whose"),
        (("features.source=random", "features.width=null"), "features.width: expects"),
        (("features.source=random", "features.max_sms=0"), "expects at least 1, or"),
        ((*TIERED, "trainer.run.dtype=float64"), "one rank, capture=false, float32"),
        ((*TIERED, "trainer.optimizer.weight_decay=0.1"), "no weight decay"),
    ],
)
def test_what_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(Exception, match=message):
        trainer_of(*words).train()


def test_files_of_other_sizes(rows: str, tmp_path: Path) -> None:
    num = len(np.load(rows))
    for array, message in [
        (np.zeros((3, 4), "f4"), "a row for each of .* nodes, got 3"),
        (np.zeros((3, 4), "i4"), "expects float16, 32 or 64, got int32"),
        (np.zeros(3, "f4"), r"expects one array of rows, got shape \[3\]"),
        (np.zeros((num, 0), "f4"), r"expects one array of rows, got shape \[\d+, 0\]"),
        (np.where(np.eye(num, 4) > 0, 1, np.inf), "got inf at row 0, column 1"),
    ]:
        np.save(tmp_path / "other.npy", array)
        with pytest.raises(ValueError, match=message):
            trainer_of(f"features.source={tmp_path}/other.npy").train()
    whole = Path(rows).read_bytes()
    Path(rows).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"expects a .npy file, got .*rows.npy"):
        trainer_of(f"features.source={rows}").train()


@pytest.mark.parametrize("layer", ["sage", "gin", "gat"])
def test_message_layers_learn(layer: str) -> None:
    losses = trainer_of("trainer.epochs=12", gnn=f"message_{layer}").train().losses
    assert losses[-1] < losses[0]
    with pytest.raises(Exception, match=f"capture=false with layer {layer}"):
        trainer_of("trainer.capture=true", gnn=f"message_{layer}")


def test_trees_are_learnt() -> None:
    """Expressions that three levels up are not what their leaves say."""
    words = ["trainer.data.scale=0.3", "trainer.epochs=25"]
    words.append("trainer.optimizer.learning_rate=0.05")
    result = trainer_of(*words, gnn="message_treelstm").train()
    assert result.mean_accuracy > 0.9


def test_graphs_of_files(tmp_path: Path) -> None:
    """ogbn-mag's sample and FB15k-237, in their files' forms."""
    made = np.random.default_rng(0)
    mag, triples = tmp_path / "mag", tmp_path / "fb15k"
    mag.mkdir()
    triples.mkdir()
    for name, most in (("citing", 70_000), ("writing", 70_000), ("is-about", 6_000)):
        edges = made.integers(0, most, (2, 300), dtype=np.int32)
        np.save(mag / f"{name}_coo_2.npy", edges)
    for part in ("train", "valid", "test"):
        pairs = made.integers(40, size=(90, 2))
        lines = "".join(f"/m/{a}\t/r/{a % 5}\t/m/{b}\n" for a, b in pairs)
        (triples / f"{part}.txt.xz").write_bytes(lzma.compress(lines.encode()))
    for name, directory in (("mag", mag), ("fb15k-237", triples)):
        words: list[Any] = [f"trainer.data.name={name}"]
        words += [f"trainer.data.directory={directory}", "trainer.data.num_labelled=30"]
        words += ["features.source=random", "features.width=4", "trainer.batch=8"]
        found = trainer_of(*words, *TIERED).train()
        assert len(found.losses) == 3
        assert torch.isfinite(torch.tensor(found.losses)).all()
    (mag / "citing_coo_2.npy").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"expected an .npy array in .*citing_coo_2"):
        trainer_of("trainer.data.name=mag", f"trainer.data.directory={mag}").train()
    assert json.dumps(trainer_of("trainer.data.name=mag").settings())
