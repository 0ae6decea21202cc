"""Directories that must be refused, and those that deserve a word."""

import os
import types
import warnings
from pathlib import Path

import pytest

from ssdtrain.errors import ConfigError
from ssdtrain.storage import PosixStorage, open_storage
from ssdtrain.storage import directory as directory_module
from ssdtrain.storage.directory import check_directory, file_system_of
from ssdtrain.storage.stripe import StripeStorage


@pytest.fixture(autouse=True)
def quiet() -> None:
    """The machine's own temporary directory may be a tmpfs."""
    warnings.simplefilter("ignore")


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'.*/none' does not exist; create"):
        check_directory(tmp_path / "none")


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is not a directory; set directory"):
        check_directory(tmp_path / "file")


def test_a_symbolic_link_names_its_target(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match=r"symbolic link.*set directory='.*/real'"):
        check_directory(tmp_path / "link")


def in_group(monkeypatch: pytest.MonkeyPatch, name: str, members: list[str]) -> None:
    """Every directory's group has this name and these members."""
    group = types.SimpleNamespace(gr_name=name, gr_mem=members)
    user = types.SimpleNamespace(pw_name="me")
    monkeypatch.setattr(directory_module.grp, "getgrgid", lambda _: group)
    monkeypatch.setattr(directory_module.pwd, "getpwuid", lambda _: user)


def test_a_private_group_is_nobody_else(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.chmod(0o775)
    in_group(monkeypatch, "me", [])
    assert check_directory(directory) == directory
    for name, members in (("staff", []), ("me", ["me", "you"])):
        in_group(monkeypatch, name, members)
        with pytest.raises(ConfigError, match="writable by others"):
            check_directory(directory)
    directory.chmod(0o777)
    in_group(monkeypatch, "me", [])
    with pytest.raises(ConfigError, match="writable by others"):
        check_directory(directory)


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_writable_by_others(
    tmp_path: Path, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_group(monkeypatch, "staff", [])
    place = tmp_path / "shared"
    place.mkdir()
    place.chmod(mode)
    with pytest.raises(ConfigError, match=f"writable by others.*mode {mode:o}"):
        check_directory(place)
    place.chmod(mode | 0o1000)  # sticky, as /tmp: ours stays ours
    assert check_directory(place) == place


def test_owned_by_somebody_else(directory: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    os.chown(directory, 12345, -1)
    with pytest.raises(ConfigError, match="belongs to user 12345, not to 0"):
        check_directory(directory)


def test_not_writable(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_, **__: False)  # root may write anywhere
    with pytest.raises(ConfigError, match="is not writable for user"):
        check_directory(directory)


def test_read_only_mount() -> None:
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    read_only = [w[4] for w in map(str.split, mounts) if w[5].split(",")[0] == "ro"]
    places = [p for p in read_only if os.path.isdir(p) and os.access(p, os.R_OK)]
    if not places:
        pytest.skip("no read-only mount here")
    with pytest.raises(ConfigError, match="read-only mount"):
        check_directory(places[0])


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("tmpfs", "main memory, not an SSD"),
        ("overlay", "container's writable layer"),
        ("nfs4", "a network file system"),
        ("lustre", "a network file system"),
    ],
)
def test_one_warning_names_the_file_system(
    kind: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_module, "file_system_of", lambda _: kind)
    with pytest.warns(UserWarning, match=f"is on {kind}, .*{words}") as told:
        check_directory(tmp_path)
    assert len(told) == 1


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "unknown"])
def test_no_warning_for_disks(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_module, "file_system_of", lambda _: kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_directory(tmp_path)


def test_file_system_type_is_read_from_the_mount() -> None:
    fd = os.open("/proc", os.O_RDONLY)
    try:
        assert file_system_of(fd) == "proc"
    finally:
        os.close(fd)


def test_open_storage(tmp_path: Path) -> None:
    places = [tmp_path / "a", tmp_path / "b"]
    for place in places:
        place.mkdir()
    store = open_storage(places)
    assert isinstance(store, StripeStorage)
    files = [member.storage for member in store.members]
    assert [f.directory for f in files if isinstance(f, PosixStorage)] == [
        str(place) for place in places
    ]
    store.close()


def test_open_storage_refuses(directory: Path) -> None:
    with pytest.raises(ConfigError, match="needs a directory, got none"):
        open_storage([])
    with pytest.raises(ConfigError, match="twice"):
        open_storage([directory, f"{directory}/"])
