"""C that the user's compiler builds into the user's cache."""

import ctypes
from pathlib import Path

import pytest

from ssdtrain.errors import ConfigError
from ssdtrain.storage.clibrary import BuildError, CLibrary
from tests.compilers import needs_compiler


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CLibrary:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return of_text(tmp_path, "int seven(void) { return 7; }")


def of_text(folder: Path, body: str) -> CLibrary:
    source = folder / "own.c"
    source.write_text(f'__attribute__((visibility("default"))) {body}\n')
    return CLibrary(source)


@needs_compiler
def test_it_is_built_once_for_each_version(library: CLibrary) -> None:
    path = library.built()
    assert ctypes.CDLL(str(path)).seven() == 7
    before = path.stat().st_mtime_ns
    assert library.built() == path and path.stat().st_mtime_ns == before
    newer = of_text(library.source.parent, "int seven(void) { return 8; }")
    assert newer.built() != path and ctypes.CDLL(str(newer.path)).seven() == 8


def test_a_header_of_its_own_is_part_of_the_version(library: CLibrary) -> None:
    before = library.path
    library.source.with_suffix(".h").write_text("/* another */\n")
    assert library.path != before


@needs_compiler
def test_the_compilers_words_are_told(
    library: CLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BuildError, match="nothing_of_c"):
        of_text(library.source.parent, "nothing_of_c").built()
    assert not list(library.path.parent.glob("*"))
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(BuildError, match="set CC"):
        library.build()


@needs_compiler
def test_a_cache_that_cannot_be_written_is_told(
    library: CLibrary, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no directory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(BuildError, match="file"):
        library.built()


def test_a_user_without_a_home_is_told_so(
    library: CLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    def home() -> Path:
        raise RuntimeError("no home directory")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", home)
    with pytest.raises(BuildError, match="no home directory"):
        library.built()


@needs_compiler
def test_what_others_could_have_written_is_refused(library: CLibrary) -> None:
    library.built().chmod(0o722)
    with pytest.raises(ConfigError, match="writable by others"):
        library.built()
