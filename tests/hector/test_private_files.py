"""Nothing is executed that others could have written."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hector.emit.module import load_module
from hector.private_files import (
    UnsafeCacheError,
    cache_directory,
    private_directory,
    read_private,
    write_private,
)

TEXT = "VALUE = {}\n"
root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be somebody else")


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_new_directory_is_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HECTOR_CACHE", str(tmp_path / "a" / "b"))
    assert mode(cache_directory()) == 0o700


def test_an_open_directory_of_the_user_is_closed(tmp_path: Path) -> None:
    place = tmp_path / "cache"
    place.mkdir()
    place.chmod(0o755)
    assert mode(private_directory(place)) == 0o700


@pytest.mark.parametrize("bits", [0o777, 0o775, 0o1777])
def test_where_others_could_write(tmp_path: Path, bits: int) -> None:
    place = tmp_path / "cache"
    place.mkdir()
    place.chmod(bits)
    with pytest.raises(UnsafeCacheError, match="others may write"):
        load_module(TEXT.format(1), place)
    assert list(place.iterdir()) == []


@root
def test_somebody_elses_directory(tmp_path: Path) -> None:
    place = tmp_path / "cache"
    place.mkdir(mode=0o700)
    os.chown(place, 12345, 12345)
    with pytest.raises(UnsafeCacheError, match="belongs to user 12345"):
        load_module(TEXT.format(2), place)


def test_a_link(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(real)
    with pytest.raises(UnsafeCacheError, match="a link or a file"):
        load_module(TEXT.format(3), tmp_path / "link")


def planted(place: Path, text: str) -> Path:
    """Where the module of `text` lies."""
    module = load_module(text, place)
    sys.modules.pop(module.__name__)
    return Path(str(module.__file__))


def test_a_file_with_other_content_is_not_executed(tmp_path: Path) -> None:
    place = private_directory(tmp_path / "cache")
    text = TEXT.format(4)
    path = planted(place, text)
    path.write_text("raise SystemExit('executed')\n")
    assert load_module(text, place).VALUE == 4
    assert path.read_text() == text


def test_a_link_in_a_files_place_is_not_followed(tmp_path: Path) -> None:
    place, text = private_directory(tmp_path / "cache"), TEXT.format(5)
    path, outside = planted(place, text), tmp_path / "outside.py"
    outside.write_text(text)
    path.unlink()
    path.symlink_to(outside)
    assert read_private(path) is None
    assert load_module(text, place).VALUE == 5
    assert not path.is_symlink() and outside.read_text() == text


@root
def test_somebody_elses_file_is_not_read(tmp_path: Path) -> None:
    place, text = private_directory(tmp_path / "cache"), TEXT.format(6)
    path = planted(place, text)
    os.chown(path, 12345, 12345)
    assert read_private(path) is None


def test_bytecode_is_not_read(tmp_path: Path) -> None:
    """Python would import it instead of the file."""
    place, text = private_directory(tmp_path / "cache"), TEXT.format(7)
    path = planted(place, text)
    code = (
        "import importlib.util, py_compile, sys, os\n"
        "sys.pycache_prefix = None\n"
        "path, evil = sys.argv[1:]\n"
        "found = os.stat(path)\n"
        "open(evil, 'w').write('VALUE = 0\\n')\n"
        "os.utime(evil, ns=(found.st_atime_ns, found.st_mtime_ns))\n"
        "py_compile.compile(evil, importlib.util.cache_from_source(path),\n"
        "    invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)\n"
    )
    evil = str(tmp_path / "evil.py")
    subprocess.run([sys.executable, "-c", code, str(path), evil], check=True)
    assert list((place / "__pycache__").iterdir())
    assert load_module(text, place).VALUE == 7


def test_files_are_readable_by_their_user_alone(tmp_path: Path) -> None:
    path = private_directory(tmp_path / "cache") / "x.json"
    write_private(path, "{}")
    assert mode(path) == 0o600
    assert list(path.parent.iterdir()) == [path]


DAMAGED = [
    "",
    "{",
    "[" * 3000,
    "[]",
    "null",
    "{}",
    '{"kind": "GemmSchedule"}',
    '{"kind": "Unknown", "fields": {}}',
    '{"kind": "GemmSchedule", "fields": {"nothing": 1}}',
    '{"kind": "GemmSchedule", "fields": {"block_rows": "64"}}',
    '{"kind": "GemmSchedule", "fields": {"block_rows": -1}}',
    '{"kind": "GemmSchedule", "fields": {"block_rows": 48}}',
    '{"kind": "GemmSchedule", "fields": {"block_rows": 1e9}}',
    '{"kind": "TraversalSchedule", "fields": {"mapping": "nobody"}}',
]


@pytest.mark.parametrize("text", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_schedule_is_said_and_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    pytest.importorskip("triton")
    from hector.runtime.tune import read_schedule

    path = private_directory(tmp_path / "cache") / "x.json"
    write_private(path, text)
    assert read_schedule(path) is None
    assert str(path) in caplog.text


def test_a_schedule_is_read_as_it_was_written(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from hector.ir.kernels import SegmentMapping, TraversalSchedule
    from hector.runtime.tune import read_schedule, write_schedule

    path = tmp_path / "schedules" / "x.json"
    made = TraversalSchedule(mapping=SegmentMapping.SPLIT, heavy_first=True)
    write_schedule(path, made)
    assert read_schedule(path) == made
    assert json.loads(path.read_text())["kind"] == "TraversalSchedule"
