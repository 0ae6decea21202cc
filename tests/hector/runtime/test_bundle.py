"""Kernels compiled for a GPU that is not here, and the bundles that carry them."""

import json
import logging
import os
import sys
import sysconfig
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from hector.__main__ import main
from hector.graph import HeteroGraph
from hector.nn.layers import edge_sum
from hector.runtime import executables
from hector.runtime.ahead import Target, compiling_for
from hector.runtime.bundle import Added, BundleError, add, add_shipped, described, pack

ROWS = torch.randn(4, 3)
Change = Callable[[dict[str, bytes]], None]


def graph() -> HeteroGraph:
    ends = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]])
    return HeteroGraph.from_arrays(ends[0], ends[1], torch.zeros(4).long())


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Empty ones, on disk and in this process."""
    monkeypatch.setenv("HECTOR_CACHE", str(tmp_path / "hector"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    forget()
    yield
    forget()


def forget() -> None:
    for name in [n for n in sys.modules if n.startswith("hector_generated_")]:
        del sys.modules[name]


def compiled() -> tuple[Target, list[bool]]:
    """One small kernel for sm_90, and whether Triton's cache had it."""
    from triton import knobs

    hits: list[bool] = []
    knobs.compilation.listener = lambda **found: hits.append(found["cache_hit"])
    try:
        with compiling_for(90) as target:
            out = edge_sum.with_options()(graph(), ROWS, False)
    finally:
        knobs.compilation.listener = None
    assert out.shape == (3, 3)
    return target, hits


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of one kernel."""
    place = tmp_path_factory.mktemp("bundle")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HECTOR_CACHE", str(place / "hector"))
        patch.setenv("TRITON_CACHE_DIR", str(place / "triton"))
        forget()
        target, hits = compiled()
        assert hits == [False]
        assert pack(place / "kernels.zip", target.kernels) == 1
    return place / "kernels.zip"


def test_a_bundle_is_found_and_nothing_compiled(bundle: Path) -> None:
    assert add(bundle) == Added(1, 0, 0) and add(bundle) == Added(0, 1, 0)
    _, hits = compiled()
    assert hits == [True]


def test_launchers_travel(bundle: Path, tmp_path: Path) -> None:
    """As Triton keeps what its C compiler made; files of others stay where they are."""
    from triton.runtime.cache import get_cache_manager

    end = sysconfig.get_config_var("EXT_SUFFIX")
    names = [f"__triton_launcher{end}", f"cuda_utils{end}", f"other{end}"]
    for number, name in enumerate(names):
        get_cache_manager(f"{number:064x}").put(name.encode(), name, binary=True)
    add(bundle)
    assert pack(tmp_path / "all.zip") == 1
    os.environ["TRITON_CACHE_DIR"] = str(tmp_path / "elsewhere")
    assert add(tmp_path / "all.zip") == Added(1, 0, 0)
    for number, name in enumerate(names):
        found = get_cache_manager(f"{number:064x}").get_file(name)
        assert (found is None) == name.startswith("other")
        assert found is None or Path(found).read_bytes() == name.encode()


def test_what_was_compiled_ahead_does_not_run() -> None:
    """The same layer, graph and rows on the CPU: values, and no kernel."""
    layer, g = edge_sum.with_options(), graph()
    with compiling_for(90):
        layer(g, ROWS, False)
    out = layer(g, ROWS, False)
    order = g.edge_order
    expected = torch.zeros(3, 3).index_add(0, g.dst, ROWS[order])
    torch.testing.assert_close(out, expected)
    assert len(executables(g)) == 2


def test_one_target_at_a_time() -> None:
    with compiling_for(90), pytest.raises(RuntimeError, match="one target"):
        compiling_for(80).__enter__()
    with pytest.raises(ValueError, match="expected arch as 90"):
        compiling_for(9).__enter__()


def rewritten(bundle: Path, to: Path, change: Change) -> Path:
    with zipfile.ZipFile(bundle) as archive:
        members = {n: archive.read(n) for n in archive.namelist()}
    change(members)
    with zipfile.ZipFile(to, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return to


def in_manifest(change: Callable[[dict[str, Any]], object]) -> Change:
    def apply(members: dict[str, bytes]) -> None:
        manifest = json.loads(members["manifest.json"])
        change(manifest)
        members["manifest.json"] = json.dumps(manifest).encode()

    return apply


def one_bit(members: dict[str, bytes]) -> None:
    name = next(n for n in members if n.endswith(".cubin"))
    data = bytearray(members[name])
    data[100] ^= 1
    members[name] = bytes(data)


def outside(manifest: dict[str, Any]) -> None:
    manifest["members"]["../../evil.json"] = "0" * 64


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (one_bit, "not what the manifest says"),
        (in_manifest(lambda m: m.update(triton_build="0")), "another build"),
        (in_manifest(lambda m: m.update(format=2)), "of format 1"),
        (in_manifest(lambda m: m.pop("triton")), "no bundle of kernels"),
        (in_manifest(lambda m: m["members"].popitem()), "metadata and machine code"),
        (in_manifest(outside), "got a member"),
        (lambda m: m.pop("manifest.json"), "no bundle of kernels"),
        (lambda m: m.pop(max(m)) and None, "no item named|damaged"),
    ],
)
def test_bundles_that_are_refused(
    bundle: Path, tmp_path: Path, change: Change, told: str
) -> None:
    wrong = rewritten(bundle, tmp_path / "wrong.zip", change)
    with pytest.raises(BundleError, match=told):
        add(wrong)
    assert not list(tmp_path.glob("triton/*/*"))
    assert not (tmp_path / "evil.json").exists()


def test_no_zip_and_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("no zip")
    assert main(["kernels", "add", str(tmp_path / "text")]) == 1
    assert "is damaged" in capsys.readouterr().err
    assert main(["kernels", "add", str(tmp_path / "none")]) == 1
    assert "cannot open" in capsys.readouterr().err
    assert main(["kernels", "pack", "--out", str(tmp_path / "out.zip")]) == 1
    assert "train once" in capsys.readouterr().err
    assert not (tmp_path / "out.zip").exists()


@pytest.mark.parametrize("bits", [0o664, 0o646])
def test_what_others_could_have_written(
    bundle: Path, tmp_path: Path, bits: int
) -> None:
    copy = rewritten(bundle, tmp_path / "copy.zip", lambda _: None)
    copy.chmod(bits)
    with pytest.raises(BundleError, match="nobody else may write"):
        add(copy)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be somebody else")
def test_somebody_elses(bundle: Path, tmp_path: Path) -> None:
    copy = rewritten(bundle, tmp_path / "copy.zip", lambda _: None)
    os.chown(copy, 12345, 12345)
    with pytest.raises(BundleError, match="got user 12345"):
        add(copy)


def test_shipped_bundles_are_added_once(
    bundle: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "hector" / "kernels"
    place.mkdir(parents=True, mode=0o700)
    (tmp_path / "hector").chmod(0o700)
    rewritten(bundle, place / "good.zip", lambda _: None)
    rewritten(bundle, place / "bad.zip", one_bit)
    with caplog.at_level(logging.INFO, logger="hector.runtime.bundle"):
        add_shipped()
        add_shipped()
    told = [r.getMessage() for r in caplog.records]
    assert [m for m in told if "1 kernels of" in m and "good.zip" in m] == [told[1]]
    assert all("bad.zip are not used" in m for m in (told[0], told[2]))
    assert compiled()[1] == [True]


def test_the_command_line(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule = tmp_path / "hector" / "schedules" / f"{'a' * 24}.json"
    schedule.parent.mkdir(parents=True)
    schedule.write_text("{}")
    for path in (schedule.parent.parent, schedule.parent):
        path.chmod(0o700)
    assert main(["kernels", "add", str(bundle)]) == 0
    out = tmp_path / "all.zip"
    assert main(["kernels", "pack", "--out", str(out)]) == 0
    schedule.unlink()
    assert main(["kernels", "add", str(out)]) == 0
    assert main(["kernels", "show", str(out)]) == 0
    told = capsys.readouterr().out
    assert "1 kernels added, 0 were there, 0 schedules" in told
    assert "0 kernels added, 1 were there, 1 schedules" in told
    assert schedule.read_text() == "{}"
    assert described(out)["kernels"] == described(bundle)["kernels"]
    assert all(n in told for n in described(out)["kernels"].values())


def test_made_for_a_layer_without_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "made.zip"
    command = ["kernels", "make", "--arch", "80", "--layers", "rgcn", "--widths", "16"]
    assert main([*command, "--dtypes", "bfloat16", "--out", str(made)]) == 0
    about = described(made)
    told = f"{len(about['kernels'])} kernels"
    assert capsys.readouterr().out.count(told) == 2 and len(about["kernels"]) > 5
    with zipfile.ZipFile(made) as archive:
        names = [n for n in archive.namelist() if n.endswith(".json") and "/" in n]
        targets = [json.loads(archive.read(n))["target"] for n in names]
    assert {t["arch"] for t in targets} == {80}
    assert main(["kernels", "add", str(made)]) == 0
    assert f"0 kernels added, {told[:2].strip()}" in capsys.readouterr().out
