"""One thin file for each trainer, and `autoload`, which is called as Python starts.

Importing this package loads no torch and no trainer.
"""

from typing import TYPE_CHECKING, Any

from ssdtrain.errors import ConfigError
from ssdtrain.versions import installed, numbers

if TYPE_CHECKING:
    from ssdtrain.config import OffloadConfig

TESTED = {
    "transformers": ((5, 0), (6,)),
    "lightning": ((2, 5), (3,)),
    "axolotl": ((0, 18), (0, 20)),
    "llamafactory": ((0, 9, 5), (0, 10)),
    "ms-swift": ((4, 6), (5,)),
    "nemo-automodel": ((0, 7), (0, 8)),
    "torchtitan": ((0, 3), (0, 4)),
    "verl": ((0, 9), (0, 10)),
}
"""By package: the least version tests ran with, and the first that is refused."""


def check_trainer_version(package: str, met: str | None = None) -> None:
    """Refuse a trainer whose hooks were not read; `met`: its version, where it says so
    itself. Raises ConfigError: another version is installed."""
    least, below = TESTED[package]
    found = installed(package) if met is None else met
    if found is None or not least <= numbers(found) < below:
        low, high = (".".join(map(str, each)) for each in (least, below))
        raise ConfigError(
            f"ssdtrain works with {package}>={low},<{high}; {found or 'none'} is "
            f'installed. Set: pip install "{package}>={low},<{high}"'
        )


def block_settings(cfg: Any) -> "OffloadConfig":
    """The block `ssdtrain` of a trainer's own configuration. Raises ConfigError: there
    is none, or a setting can never work."""
    from ssdtrain.config import OffloadConfig  # it imports torch

    block = cfg.get("ssdtrain", None)
    if not block:
        raise ConfigError(
            f"expects a block 'ssdtrain' such as 'device_memory: fit', got {block!r}."
        )
    to_dict = getattr(block, "to_dict", lambda: dict(block))
    return OffloadConfig.from_mapping(to_dict())
