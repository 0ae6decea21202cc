"""Configs: where they are looked up, what they accept, how they refuse."""

from dataclasses import fields
from pathlib import Path

import pytest
from hydra.errors import HydraException
from omegaconf import OmegaConf

from ssdtrain.config import OffloadConfig
from ssdtrain.errors import ConfigError
from ssdtrain.train.compose import compose_config, find_config, packaged_directory
from ssdtrain.train.settings import RunSettings

GROUPS = ("size", "model", "host", "offload", "data", "train")
CHOICES = [
    (group, path.stem)
    for group in GROUPS
    for path in sorted((packaged_directory() / group).glob("*.yaml"))
]


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
    ("override", "message"),
    [
        ("offload=sdd", "Available options in 'offload'"),
        ("offload.tarjet=ssd", "Could not override 'offload.tarjet'"),
        ("model.hidden=3", "Could not override 'model.hidden'"),
        ("train.steps=many", "train.steps=many"),
        ("nonsense=1", "Could not override 'nonsense'"),
    ],
)
def test_unknown_keys_fail_with_hydras_message(override: str, message: str) -> None:
    with pytest.raises(HydraException, match=message):
        compose_config("ssdtrain.yaml", [override])


def test_a_directory_with_a_space_is_searched(tmp_path: Path) -> None:
    path = tmp_path / "my configs" / "run.yaml"
    path.parent.mkdir()
    path.write_text("defaults:\n  - offload: none\n  - _self_\n")
    assert compose_config(str(path), []).offload == {}
