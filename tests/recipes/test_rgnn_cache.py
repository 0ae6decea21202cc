"""Packed kernels: what comes back, and what does not belong."""

import json
import tarfile
from pathlib import Path

import pytest

from recipes.bench.rgnn import cache as rgnn_cache


def kernel(directory: Path, key: str) -> None:
    """An entry as Triton writes it: stages, description, list of files."""
    entry = directory / key
    entry.mkdir(parents=True)
    files = {}
    for name in ("k.ttir", "k.ptx", "k.cubin", "k.json"):
        (entry / name).write_text(f"{key} {name}")
        files[name] = str(entry / name)
    (entry / "__grp__k.json").write_text(json.dumps({"child_paths": files}))


def test_binaries_come_back_under_another_path(tmp_path: Path) -> None:
    for key in ("AAA", "BBB"):
        kernel(tmp_path / "cache", key)
    (tmp_path / "cache" / "half").mkdir()
    packed = tmp_path / "out" / "kernels.tgz"
    assert rgnn_cache.pack(tmp_path / "cache", packed) == (2, 0)
    other = tmp_path / "other"
    assert rgnn_cache.unpack(packed, other) == 2
    group = json.loads((other / "BBB" / "__grp__k.json").read_text())["child_paths"]
    assert set(group) == {"k.cubin", "k.json"}
    assert Path(group["k.cubin"]).read_text() == "BBB k.cubin"
    assert Path(group["k.cubin"]).is_relative_to(other)


def test_a_full_file_takes_no_more(tmp_path: Path) -> None:
    kernel(tmp_path / "cache", "AAA")
    packed = tmp_path / "kernels.tgz"
    found = rgnn_cache.pack(tmp_path / "cache", packed, limit_bytes=-1)
    assert found == (0, 1)


def test_nothing_is_written_outside(tmp_path: Path) -> None:
    packed = tmp_path / "kernels.tgz"
    (tmp_path / "x").write_text("x")
    with tarfile.open(packed, "w:gz") as tar:
        tar.add(tmp_path / "x", arcname="../x.cubin")
    with pytest.raises(ValueError, match="no packed kernel cache"):
        rgnn_cache.unpack(packed, tmp_path / "in")
