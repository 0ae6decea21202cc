"""Choices of the config's groups, and what is refused before torch and Hydra are
loaded, which takes ten seconds on a busy machine."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from ssdtrain.errors import ConfigError
from ssdtrain.packaged import packaged_directory
from ssdtrain.quantities import did_you_mean

DEFAULT_CONFIG = "ssdtrain.yaml"
NO_GPU = (
    "engine=megatron needs a GPU on every rank (megatron-core puts its tensors on CUDA "
    "devices); set engine=deepspeed or engine=plain."
)
_CALLED = re.compile(r"^# Also called: (.+)\.$", re.M)
_NAME = re.compile(r"[\w.-]+")
_EMPTY = ("null", "none", "true", "false")
_GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Of NVIDIA's driver, AMD's, and Windows' for Linux."""


def refuse_early(name: str, words: Sequence[str], *, to_run: bool = True) -> None:
    """Raise ConfigError for choices that the packaged configs do not have, and,
    `to_run`, for engine=megatron without any GPU. A root config of one's own may bring
    its own choices."""
    if name != DEFAULT_CONFIG or Path(name).exists():
        return
    groups: list[str] = group_names()
    chosen: dict[str, str] = {}
    for word in words:
        key, _, value = word.partition("=")
        if key not in groups:
            continue
        chosen[key] = value.strip("'\"")
        known = choices_of(key)
        for one in chosen[key].split(","):
            if _NAME.fullmatch(one) and one.lower() not in _EMPTY and one not in known:
                raise ConfigError(no_choice(key, one, known))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip()
    may_have_gpu = visible not in ("", "-1") and any(map(os.path.exists, _GPU_FILES))
    if to_run and chosen.get("engine") == "megatron" and not may_have_gpu:
        raise ConfigError(NO_GPU)


def group_names() -> list[str]:
    """Return the packaged groups."""
    return sorted(p.name for p in packaged_directory().iterdir() if p.is_dir())


def choices_of(group: str) -> list[str]:
    """Return the packaged choices of a group."""
    found = (path.stem for path in (packaged_directory() / group).glob("*.yaml"))
    return sorted(name for name in found if not name.startswith("_"))


def no_choice(group: str, word: str, known: Sequence[str]) -> str:
    """Return what to say of a choice that is not there."""
    meant = [one for one in known if word.lower() in called(group, one)]
    near = did_you_mean(meant[0] if meant else word, known)
    return f"unknown choice {group}={word}{near}\nchoices: {', '.join(known)}"


def called(group: str, choice: str) -> list[str]:
    """Return what others call a packaged choice, by its file's `# Also called: ...`."""
    path = packaged_directory() / group / f"{choice}.yaml"
    found = _CALLED.search(path.read_text(encoding="utf-8")) if path.is_file() else None
    return found[1].split(", ") if found else []
