"""Nobody else can put kernels or times where this user's are loaded from."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from pydirect.kernels import cache, nvrtc
from pydirect.kernels.cache import (
    CacheDirectoryError,
    cache_directory,
    read_private,
    write_atomically,
)

SOURCE = Path(nvrtc.__file__).with_name("gather.cu")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "pydirect"


def test_the_directory_is_made_private(place: Path) -> None:
    old = os.umask(0)
    try:
        assert cache_directory() == place
    finally:
        os.umask(old)
    assert stat.S_IMODE(place.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o722, 0o1777])
def test_a_directory_that_others_can_write_is_refused(place: Path, mode: int) -> None:
    place.mkdir()
    place.chmod(mode)
    with pytest.raises(CacheDirectoryError, match=r"other users.*chmod go-w"):
        cache_directory()
    with pytest.raises(CacheDirectoryError, match="written by other users"):
        write_atomically(place / "a.cubin", b"")
    assert list(place.iterdir()) == []


def test_a_directory_of_somebody_else_is_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_directory()
    me = os.geteuid()
    monkeypatch.setattr(cache.os, "geteuid", lambda: me + 1)
    with pytest.raises(
        CacheDirectoryError, match=f"belongs to user {me}, not to user {me + 1}"
    ):
        cache_directory()


def test_a_link_in_place_of_the_directory_is_refused(
    place: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    place.symlink_to(elsewhere)
    with pytest.raises(CacheDirectoryError, match="a link"):
        cache_directory()


def test_files_are_private_too(place: Path, tmp_path: Path) -> None:
    file = cache_directory() / "a.cubin"
    write_atomically(file, b"kernels")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert read_private(file) == b"kernels"
    file.chmod(0o622)
    with pytest.raises(CacheDirectoryError, match=r"a\.cubin can be written by other"):
        read_private(file)
    file.unlink()
    planted = tmp_path / "planted"
    planted.write_bytes(b"worse")
    file.symlink_to(planted)
    with pytest.raises(CacheDirectoryError, match="symbolic link"):
        read_private(file)
    with pytest.raises(FileNotFoundError):
        read_private(place / "nothing")


def test_a_planted_kernel_is_not_loaded(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the compiler's result rests, writable for everybody."""
    monkeypatch.setattr(nvrtc, "_version", lambda: (13, 0))
    compiled: list[Any] = []
    monkeypatch.setattr(nvrtc, "_compile", lambda *a: compiled.append(a) or b"good")
    assert nvrtc.compile_cubin(SOURCE, "sm_90", ()) == b"good"
    assert nvrtc.compile_cubin(SOURCE, "sm_90", ()) == b"good"
    assert len(compiled) == 1, "the second time it comes from the cache"
    (cached,) = place.iterdir()
    cached.chmod(0o666)
    with pytest.raises(CacheDirectoryError):
        nvrtc.compile_cubin(SOURCE, "sm_90", ())
