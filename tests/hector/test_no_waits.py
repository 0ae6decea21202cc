"""The mode in which waits are errors ends with its test."""

import warnings

import pytest
import torch

from tests.no_waits import no_waits


@pytest.mark.parametrize("fails", [False, True])
def test_the_mode_ends_although_setting_it_warns(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[str] = []

    def set_mode(mode: str) -> None:
        modes.append(mode)
        if len(modes) == 1:
            warnings.warn("Synchronization debug mode is a prototype", stacklevel=1)

    def waits() -> None:
        with no_waits():
            assert modes == ["error"]
            if fails:
                raise RuntimeError("called a synchronizing CUDA operation")

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    if fails:
        with pytest.raises(RuntimeError, match="synchronizing"):
            waits()
    else:
        waits()
    assert modes == ["error", "default"]
