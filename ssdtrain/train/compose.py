"""From a config name and overrides to a composed config."""

from collections.abc import Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from ssdtrain.errors import ConfigError
from ssdtrain.train.schema import register

DEFAULT_CONFIG = "ssdtrain.yaml"


def packaged_directory() -> Path:
    """The configs that come with ssdtrain: in a wheel inside the package, in a
    checkout beside it."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def find_config(name: str) -> Path:
    """The file that `--config name` means: a path, a bare name in the working
    directory, or a packaged config.

    Raises:
        ConfigError: there is no such file; the text lists where it was looked for.
    """
    given = Path(name).expanduser()
    tried = [given.resolve()]
    if given.parent == Path("."):
        tried.append(packaged_directory() / given)
    for path in tried:
        if path.is_file():
            return path
    places = ", ".join(str(path) for path in tried)
    raise ConfigError(f"--config expects a YAML file, found none at {places}")


def compose_config(name: str, overrides: Sequence[str]) -> DictConfig:
    """Compose the config file `name` with Hydra overrides, `group=choice` included.

    Groups are looked up beside the file first, then among the packaged configs.

    Raises:
        ConfigError: no such file.
        hydra.errors.HydraException: unknown group, choice or key.
    """
    path = find_config(name)
    packaged = packaged_directory().as_uri()
    search = [f"hydra.searchpath=['{packaged}']"]
    register()
    GlobalHydra.instance().clear()
    with initialize_config_dir(config_dir=str(path.parent), version_base="1.3"):
        return compose(path.stem, overrides=[*search, *overrides])
