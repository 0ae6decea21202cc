"""Disks, limits and versions: read from prepared files, judged in words."""

import re
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from ssdtrain.tools.machine import disks, limits, software
from ssdtrain.tools.machine.findings import Level

ROOT = Path(__file__).resolve().parents[4]
MOUNTS = [
    ("/dev/root", "/", "ext4", "rw"),
    ("tmpfs", "/mnt", "tmpfs", "rw"),
    ("/dev/nvme0n1p1", "/mnt/fast disk", "xfs", "rw"),
]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/home", ("/dev/root", "/", "ext4")),
        ("/mnt", ("tmpfs", "/mnt", "tmpfs")),
        ("/mnt/fast disk/a", ("/dev/nvme0n1p1", "/mnt/fast disk", "xfs")),
        ("/mntx", ("/dev/root", "/", "ext4")),
    ],
)
def test_longest_mount_point(
    monkeypatch: pytest.MonkeyPatch, path: str, expected: tuple[str, str, str]
) -> None:
    monkeypatch.setattr(psutil, "disk_partitions", lambda *, all: MOUNTS)
    assert disks.mount_of(path) == expected


def test_this_directory(tmp_path: Path) -> None:
    disk = disks.inspect_disk(str(tmp_path))
    assert disk.free_bytes > 0 and disk.file_system != "unknown"
    assert list(tmp_path.iterdir()) == []
    assert all(finding.advice for finding in disks.judge_disk(disk))


def disk(**changes: object) -> disks.Disk:
    fine = disks.Disk(
        directory="/mnt/nvme0",
        file_system="ext4",
        mount_point="/mnt/nvme0",
        device="/dev/nvme0n1",
        free_bytes=1 << 40,
        direct=True,
        nameless=True,
        rotational=False,
        block_device="nvme0n1",
    )
    return replace(fine, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"file_system": "tmpfs"}, "host memory"),
        ({"file_system": "nfs4"}, "network"),
        ({"file_system": "overlay"}, "overlay"),
        ({"rotational": True, "block_device": "sda"}, "rotates"),
        ({"direct": False}, "refuses O_DIRECT"),
        ({"nameless": False}, "refuses O_TMPFILE"),
        ({"free_bytes": 1 << 30}, "GB free"),
    ],
)
def test_findings_about_disks(changes: dict[str, object], word: str) -> None:
    assert [f.level for f in disks.judge_disk(disk())] == [Level.GOOD]
    found = [f for f in disks.judge_disk(disk(**changes)) if f.level is not Level.GOOD]
    assert len(found) == 1 and word in found[0].text


def test_cgroup_limits(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    inner = tmp_path / "a/b"
    inner.mkdir(parents=True)
    membership.write_text("0::/a/b\n")
    assert limits.cgroup_memory(tmp_path, membership) is None
    (inner / "memory.max").write_text("max\n")
    (tmp_path / "a/memory.max").write_text("1000\n")
    (tmp_path / "memory.max").write_text("3000\n")
    assert limits.cgroup_memory(tmp_path, membership) == 1000
    old = tmp_path / "memory/job"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("500\n")
    (old.parent / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    membership.write_text("7:cpu:/job\n5:memory:/job\n")
    assert limits.cgroup_memory(tmp_path, membership) == 500
    assert limits.cgroup_memory(tmp_path, tmp_path / "missing") is None


def test_limits_of_this_process() -> None:
    found = limits.inspect_limits()
    assert 0 < found.host_available_bytes <= found.host_memory_bytes
    assert found.cpus >= 1
    tight = replace(
        found,
        locked_memory_bytes=8 << 20,
        file_size_bytes=1 << 30,
        cgroup_memory_bytes=found.host_memory_bytes // 2,
    )
    words = " ".join(f.text for f in limits.judge_limits(tight))
    assert "ulimit -l" in words and "ulimit -f" in words and "cgroup" in words
    free = replace(
        tight, locked_memory_bytes=None, file_size_bytes=None, cgroup_memory_bytes=None
    )
    assert [f.level for f in limits.judge_limits(free)] == [Level.GOOD]


def test_tested_versions_are_those_of_the_project_file() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    for tested in software.TESTED:
        line = re.search(rf'"{tested.package}(\[\w+\])?([<>=,.\d]+)', project)
        assert line is not None, tested.package
        bounds = dict(re.findall(r"(>=|<)([\d.]+)", line[2]))
        assert software.numbers(bounds[">="]) == tested.least, tested.package
        if "<" in bounds:
            assert software.numbers(bounds["<"]) == tested.below, tested.package


def test_findings_about_software() -> None:
    found = software.inspect_software()
    assert software.numbers(found.versions["torch"] or "")[:1] == (2,)
    other = replace(
        found,
        versions={"torch": "1.9.0+cu102", "deepspeed": None},
        gds_mode="gds",
        malloc_hook=None,
        compiler=None,
    )
    by_text = {f.text: f for f in software.judge(other)}
    assert by_text["torch 1.9.0+cu102 is outside the tested 2.11 to 2.14"].level is (
        Level.WARNING
    )
    assert by_text["deepspeed is not installed"].level is Level.NOTE
    assert "the CUDA malloc hook is not loaded" in by_text
    hint = by_text["the CUDA malloc hook is not loaded"]
    assert 'eval "$(ssdtrain env)"' in str(hint)
    assert by_text["there is no C compiler"].level is Level.NOTE
    hooked = replace(other, malloc_hook="/x/malloc_hook.so", compiler="/usr/bin/cc")
    texts = [f.text for f in software.judge(hooked)]
    assert not any("hook" in text or "compiler" in text for text in texts)


@pytest.mark.parametrize(
    ("asked", "autoload", "level", "said"),
    [
        (None, False, Level.NOTE, "not set"),
        ("fit", True, Level.GOOD, "is active"),
        ("fit", False, Level.WARNING, "did not read ssdtrain_autoload.pth"),
        ("fitt", True, Level.PROBLEM, "did you mean 'fit'"),
    ],
)
def test_findings_about_the_autoload(
    asked: str | None, autoload: bool, level: Level, said: str
) -> None:
    found = replace(software.inspect_software(), asked=asked, autoload=autoload)
    [finding] = [f for f in software.judge(found) if f.subject == "autoload"]
    assert finding.level is level and said in finding.text
