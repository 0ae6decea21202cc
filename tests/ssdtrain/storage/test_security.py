"""What another local user can see or do (docs/safety.md)."""

import ast
import os
import secrets
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

import ssdtrain
from ssdtrain.errors import ActivationChangedError
from ssdtrain.storage.posix import PosixStorage
from tests.ssdtrain.targets import all_written

ROOT = Path(__file__).resolve().parents[3]
ROOMS = ("cache", "engines", "plan", "rebuild", "storage", "transfer")
SERIALIZERS = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
NOBODY = 65534


@pytest.fixture
def open_to_all() -> object:
    """The umask of somebody who protects nothing."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_another_user_sees_nothing(tmp_path: Path, open_to_all: object) -> None:
    """The open file cannot be reached through /proc, nor can what is in it."""
    for parent in (tmp_path, *tmp_path.parents[:3]):
        if parent != Path("/tmp"):
            parent.chmod(0o755)
    place = tmp_path / "activations"
    place.mkdir(mode=0o755)
    store = PosixStorage(place, extent_bytes=1 << 20)

    def as_nobody(*command: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            command, user=NOBODY, group=NOBODY, check=False, capture_output=True
        )

    assert as_nobody("ls", str(place)).stdout == b""
    me = f"/proc/{os.getpid()}/fd"
    assert as_nobody("cat", f"{me}/{store.fileno()}").returncode != 0
    assert as_nobody("ls", me).returncode != 0
    store.close()


def test_a_planted_name_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if an attacker could guess 64 random bits and be there first."""
    trap = tmp_path / "trap"
    trap.mkdir()
    monkeypatch.setattr(secrets, "token_hex", lambda size: "guessed")
    place = tmp_path / "activations"
    place.mkdir(mode=0o700)
    (place / f"ssdtrain-{os.getpid()}-guessed").symlink_to(trap)
    with pytest.raises(FileExistsError):
        PosixStorage(place, extent_bytes=1 << 20)
    assert not list(trap.iterdir())


@pytest.mark.parametrize("room", ROOMS)
def test_bytes_are_never_code(room: str) -> None:
    """What comes back from a disk is copied, not unpickled."""
    for path in (ROOT / "ssdtrain" / room).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not SERIALIZERS & {name.split(".")[0] for name in names}, path
            if isinstance(node, ast.Attribute):
                called = ast.unparse(node)
                assert called not in ("torch.load", "torch.save"), f"{path}: {called}"


def test_tampered_bytes_are_only_data(tmp_path: Path) -> None:
    """A disk that lies changes numbers; `verify` says so, and nothing is executed."""
    place = tmp_path / "activations"
    place.mkdir(mode=0o700)
    net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    with ssdtrain.offload(net, **all_written(place), verify="checksum") as session:
        loss = net(torch.randn(32, 64, requires_grad=True)).sum()
        offloader = session.cache.offloader
        offloader.wait_io()
        storage = offloader.storage
        while not isinstance(storage, PosixStorage):
            storage = storage.inner
        size = os.fstat(storage.fileno()).st_size
        tampering = os.open(f"/proc/self/fd/{storage.fileno()}", os.O_RDWR)
        os.pwrite(tampering, b"x" * size, 0)
        os.close(tampering)
        with pytest.raises(ActivationChangedError):
            loss.backward()
