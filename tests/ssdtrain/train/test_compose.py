"""Configs: where they are looked up, what they accept, how they refuse."""

import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from hydra.errors import HydraException
from omegaconf import OmegaConf

from ssdtrain.config import OffloadConfig
from ssdtrain.errors import ConfigError
from ssdtrain.packaged import packaged_directory
from ssdtrain.tools.cli.train import compose as composed
from ssdtrain.train.choices import called, choices_of, refuse_early
from ssdtrain.train.compose import compose_config, find_config
from ssdtrain.train.refused import told_by_hydra
from ssdtrain.train.settings import RunSettings

GROUPS = ("size", "model", "engine", "offload", "data", "train")
CHOICES = [
    (group, path.stem)
    for group in GROUPS
    for path in sorted((packaged_directory() / group).glob("*.yaml"))
]
OFFLOADS = [choice for group, choice in CHOICES if group == "offload"]


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_choice_makes_settings(group: str, choice: str) -> None:
    extra = ["data.files=[a.txt]"] if (group, choice) == ("data", "text") else []
    config = compose_config("ssdtrain.yaml", [f"{group}={choice}", *extra])
    values = OmegaConf.to_container(config, resolve=True)
    settings = RunSettings.from_mapping(values)
    if settings.offload:
        OffloadConfig.from_mapping(settings.offload)


def test_offload_knows_exactly_the_fields_of_the_config() -> None:
    config = compose_config("ssdtrain.yaml", ["offload=host"])
    assert set(config.offload) == {field.name for field in fields(OffloadConfig)}


def test_bare_name_is_found_in_the_working_directory_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_config("ssdtrain.yaml").parent == packaged_directory()
    own = tmp_path / "ssdtrain.yaml"
    own.write_text(
        "defaults: [model: gpt, size: laptop, _self_]\nmine: 3\n".replace(
            "[model: gpt, size: laptop, _self_]",
            "\n  - size: laptop\n  - model: gpt\n  - _self_",
        )
    )
    assert find_config("ssdtrain.yaml") == own
    config = compose_config("ssdtrain.yaml", ["mine=4"])
    assert config.mine == 4
    assert config.model.family == "gpt"  # a packaged group under a user's root


def test_missing_file_names_the_places(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        find_config(str(tmp_path / "nowhere.yaml"))


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("offload=sdd", f"did you mean 'ssd'?\nchoices: {', '.join(OFFLOADS)}"),
        ("gnn=foo", "unknown choice gnn=foo\nchoices: gat, graphsage, hgt"),
        ("size=tiny", "size=tiny; did you mean 'laptop'?\nchoices: h12288x3"),
        ("gnn=sage", "did you mean 'graphsage'?"),
        ("offload=nvme", "did you mean 'ssd'?"),
        ("offload.tarjet=ssd", "did you mean 'offload.target'?"),
        ("train.step=3", "did you mean 'train.steps'?"),
        ("ofload=ssd", "did you mean 'offload'?"),
        ("model.hidden=3", "did you mean 'model.hidden_size'?"),
        # By the last name, wherever it is; and as others call it.
        ("offload.steps=3", "did you mean 'train.steps'?"),
        ("steps=3", "did you mean 'train.steps'?"),
        ("lr=1e-3", "did you mean 'train.learning_rate'?"),
        ("train.batch_size=8", "did you mean 'train.micro_batch_size'?"),
        ("train.epochs=2", "did you mean 'train.steps'?"),
        ("seq_len=64", "did you mean 'size.sequence_length' or 'model.sequence_"),
        ("gnn=rgcn trainer.optimizer.num_epochs=1", "mean 'trainer.epochs'?"),
        ("gnn=rgcn lr=0.1", "did you mean 'trainer.optimizer.learning_rate'?"),
        ("gnn=graphsage trainer.num_epochs=1", "did you mean 'trainer.epochs'?"),
        ("xyzzy=1", "unknown setting xyzzy"),
        ("gnn=rgcn train.step=3", "unknown setting train.step; did you mean 'train"),
    ],
)
def test_the_nearest_name_is_told(override: str, text: str) -> None:
    words = override.split()
    with pytest.raises(HydraException) as caught:
        compose_config("ssdtrain.yaml", words)
    told = told_by_hydra(caught.value, "ssdtrain.yaml", words)
    assert text in told
    assert "search path" not in told and "schema" not in told.lower()
    assert "struct" not in told and "Could not" not in told


@pytest.mark.parametrize("group", ["size", "model", "engine", "offload", "data", "gnn"])
def test_what_others_call_a_choice_leads_to_one(group: str) -> None:
    files = (packaged_directory() / group).glob("[!_]*.yaml")
    words = {path.stem: called(group, path.stem) for path in files}
    all_words = [*words, *(word for own in words.values() for word in own)]
    assert len(set(all_words)) == len(all_words) > len(words)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("gnn=rgcn train.steps=3", "gnn=rgcn does not read train.steps=3 (did you mean "
         "trainer.epochs?); it reads what stands below trainer: epochs, batch,"),
        ("gnn=graphsage train.learning_rate=1", "(did you mean trainer.optimizer.lr?)"),
        ("gnn=rgcn model=bert", "not read model=bert (it has trainer.model instead);"),
        ("gnn=gat data=text size=small", "data=text (it has trainer.dataset instead), "
         "nor size=small"),
        ("gnn=hgt offload=host engine.num_ranks=2", "not read offload=host, nor "
         "engine.num_ranks=2 (did you mean trainer.ranks?)"),
        ("gnn=hgt train.compare=false", "does not read train.compare=false; it reads"),
    ],
)  # fmt: skip
def test_what_a_trainer_does_not_read_is_refused(words: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        composed("ssdtrain.yaml", words.split())
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_of_a_file_too(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("gnn: rgcn\ntrain:\n  steps: 3\nname: mine\n")
    with pytest.raises(ConfigError, match=r"does not read train\.steps of .*my\.yaml"):
        composed(str(path), [])


def test_a_graph_run_has_the_settings_that_it_reads_alone() -> None:
    config = composed("ssdtrain.yaml", ["gnn=rgcn", "trainer.epochs=2", "name=x"])
    own = {"name", "numa", "preload", "progress", "resume", "run_directory"}
    assert set(config) == {*own, "features", "trainer"}
    whole = composed("ssdtrain.yaml", ["model=bert", "train.steps=3"])
    assert {"model", "train", "offload"} <= set(whole)


def test_groups_that_a_trainer_refers_to_stay(tmp_path: Path) -> None:
    (tmp_path / "gnn").mkdir()
    (tmp_path / "gnn" / "own.yaml").write_text(
        "# @package _global_\ntrainer:\n  _target_: hector.train.RunConfig\n"
        "  seed: ${train.seed}\n"
    )
    path = tmp_path / "root.yaml"
    path.write_text("defaults:\n  - ssdtrain\n  - override gnn: own\n")
    config = composed(str(path), ["train.seed=3"])
    assert config.trainer.seed == 3 and "model" not in config


def test_text_needs_files() -> None:
    config = compose_config("ssdtrain.yaml", ["data=text"])
    values = OmegaConf.to_container(config, resolve=True)
    with pytest.raises(ConfigError, match=r"set data\.files"):
        RunSettings.from_mapping(values)


def test_sizes_percents_and_home_in_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    words = "offload.min_bytes=8KiB offload.max_overhead=1% offload.host_bytes=80%"
    more = "offload.directory=~/x data.max_bytes=1MiB model.dropout=5%"
    config = compose_config("ssdtrain.yaml", f"{words} {more}".split())
    values = OmegaConf.to_container(config, resolve=True)
    settings = RunSettings.from_mapping(values)
    found = OffloadConfig.from_mapping(settings.offload)
    assert found.min_bytes == 8192 and found.max_overhead == 0.01
    assert found.directories == ("/home/me/x",) and str(found.host_bytes) == "80%"
    assert settings.data.max_bytes == 2**20 and settings.model.dropout == 0.05


def test_a_file_without_defaults_changes_the_packaged_root(tmp_path: Path) -> None:
    path = tmp_path / "mini.yaml"
    path.write_text("model: bert\noffload: host\ntrain:\n  steps: 3\n  seed: 5\n")
    config = compose_config(str(path), ["train.steps=4", "offload=ssd"])
    assert config.model.family == "bert" and config.offload.target == "ssd"
    assert config.train.steps == 4 and config.train.seed == 5
    assert config.trainer._target_ == "ssdtrain.train.trainer.Trainer"
    for text, told in (
        ("trian:\n  steps: 3\n", "sets trian, which is unknown; did you mean 'train'?"),
        ("train:\n  step: 3\n", r"sets train\.step, .*did you mean 'steps'?"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=told):
            compose_config(str(path), [])


@pytest.mark.parametrize("text", ["- a\n", "a: [", "3\n"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "odd.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"odd\.yaml"):
        compose_config(str(path), [])


def test_a_directory_with_a_space_is_searched(tmp_path: Path) -> None:
    path = tmp_path / "my configs" / "run.yaml"
    path.parent.mkdir()
    path.write_text("defaults:\n  - offload: none\n  - _self_\n")
    assert compose_config(str(path), []).offload == {}


def test_early_choices_are_those_that_hydra_finds() -> None:
    for group, choice in CHOICES:
        refuse_early("ssdtrain.yaml", [f"{group}={choice}"], to_run=False)
        assert choice in choices_of(group)
    refuse_early("ssdtrain.yaml", ["model=gpt,bert", "offload='ssd'", "model.x=3"])
    refuse_early("ssdtrain.yaml", ["offload=null", "resume=latest", "train.x=brt"])
    refuse_early("own.yaml", ["model=mine"])  # may bring choices of its own


def test_a_root_config_of_ones_own_is_left_to_hydra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ssdtrain.yaml").write_text("model: bert\n")
    refuse_early("ssdtrain.yaml", ["model=mine"])


SLIPS = [
    ("model=brt", "unknown choice model=brt; did you mean 'bert'?"),
    ("-m model=gpt,brt", "unknown choice model=brt; did you mean 'bert'?"),
    ("offload=nvme", "did you mean 'ssd'?"),
    ("engine=megatron", "needs a GPU on every rank"),
]


@pytest.mark.parametrize(("words", "told"), SLIPS)
def test_slips_are_refused_before_torch_is_loaded(words: str, told: str) -> None:
    script = (
        "import sys; from ssdtrain.tools.cli import main; "
        f"code = main({['train', *words.split()]!r}); "
        "print(code, [m for m in ('torch', 'hydra') if m in sys.modules])"
    )
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", script], env=hidden, capture_output=True, text=True
    )
    assert told in done.stderr and done.stdout == "2 []\n", done
