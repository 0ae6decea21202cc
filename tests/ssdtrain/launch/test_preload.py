"""Training processes start with the malloc hook where it is of use."""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ssdtrain.errors import ConfigError
from ssdtrain.storage import malloc_hook
from ssdtrain.storage.malloc_hook import Preload, decide
from ssdtrain.tools.cli import env, main
from tests.compilers import needs_compiler
from tests.ranks import LONGEST_S

pytestmark = needs_compiler

ROOT = Path(__file__).parents[3]
CONFIG = """
defaults: [ssdtrain, _self_]
trainer:
  _target_: tests.ssdtrain.launch.mapped.Mapped
  out: ???
"""


@pytest.mark.parametrize("launcher", ["ssdtrain", "torchrun"])
def test_the_hook_is_in_the_maps_of_ranks(launcher: str, tmp_path: Path) -> None:
    """Of ranks that `ssdtrain train` starts, and of those of another launcher."""
    (tmp_path / "my.yaml").write_text(CONFIG)
    words = f"--config my.yaml trainer.out={tmp_path} preload=always".split()
    if launcher == "torchrun":
        command = [str(ROOT / "launch/torchrun"), "--nproc-per-node", "1", *words]
    else:
        command = [sys.executable, "-m", "ssdtrain", "train", *words]
        command.append("+trainer.num_ranks=1")
    scripts = Path(sys.executable).parent
    given = {
        **os.environ,
        "PATH": f"{ROOT / 'launch'}:{scripts}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=given,
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [library] = (tmp_path / "cache/ssdtrain").glob("malloc_hook-*.so")
    assert (tmp_path / "rank-0").read_text() == str(library)
    said = "starting with the malloc hook (preload=always); preload=never leaves it out"
    assert done.stdout.count(said) == 1


@pytest.fixture
def useful(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """A machine on which the hook is of use, and its environment."""
    monkeypatch.setattr(malloc_hook, "nvidia_fs_loaded", lambda: True)
    monkeypatch.setattr(malloc_hook, "find_spec", lambda name: object())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return {}


def test_when_it_is_of_use(
    useful: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = decide(Preload.AUTO, to_ssd=True, environment=useful)
    assert found == (malloc_hook.LIBRARY.path, found.why) and found.library.exists()
    assert "nvidia-fs is loaded" in found.why
    wide = "max_split_size_mb:64, expandable_segments:True"
    for given, why in [
        ({"PYTORCH_CUDA_ALLOC_CONF": wide}, "expandable segments pass it by"),
        ({"PYTORCH_ALLOC_CONF": wide}, "expandable segments pass it by"),
        ({"SSDTRAIN_HOOK": "0"}, "SSDTRAIN_HOOK=0"),
    ]:
        library, said = decide(Preload.AUTO, to_ssd=True, environment=given)
        assert library is None and why in said
    assert decide(Preload.AUTO, to_ssd=False).library is None
    assert decide(Preload.NEVER, to_ssd=True) == (None, "preload=never")
    monkeypatch.setattr(malloc_hook, "find_spec", lambda name: None)
    assert decide(Preload.AUTO, to_ssd=True).why == "kvikio is not installed"
    monkeypatch.setattr(malloc_hook, "nvidia_fs_loaded", lambda: False)
    assert decide(Preload.AUTO, to_ssd=True).why == "nvidia-fs is not loaded"
    assert decide(Preload.ALWAYS, to_ssd=False).library is not None


def test_without_a_compiler(
    useful: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CC", "no-such-cc")
    library, why = decide(Preload.AUTO, to_ssd=True, environment=useful)
    assert library is None and "no C compiler 'no-such-cc'" in why
    assert main(["env", "--preload", "always"]) == 2
    assert "no C compiler" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="preload=always: no C compiler"):
        env.start_with_hook({"preload": "always"}, ["train"], told=False)


def test_a_process_starts_anew_once(
    useful: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *call: calls.append(call))
    config = {"preload": "auto", "offload": {"max_overhead": 0.01, "target": "tiered"}}
    env.start_with_hook(config, ["train", "a=1"], told=True)
    [(path, words, environment)] = calls
    assert (path, words[1:]) == (sys.executable, ["-m", "ssdtrain", "train", "a=1"])
    assert environment["LD_PRELOAD"] == str(malloc_hook.LIBRARY.path)
    assert "starting with the malloc hook (nvidia-fs" in capsys.readouterr().out
    monkeypatch.setenv("LD_PRELOAD", environment["LD_PRELOAD"])
    with pytest.raises(ConfigError, match="did not load it; set preload=never"):
        env.start_with_hook(config, ["train"], told=False)
    monkeypatch.setattr(malloc_hook, "loaded", object)
    env.start_with_hook(config, ["train"], told=False)
    env.start_with_hook(
        {"offload": {"max_overhead": 0.01, "target": "host"}}, ["train"], told=False
    )
    env.start_with_hook({"preload": "never", **config}, ["train"], told=False)
    assert len(calls) == 1
    with pytest.raises(ConfigError, match="preload expects 'auto', 'always', 'never'"):
        env.start_with_hook({"preload": "on"}, ["train"], told=False)


def test_the_line_for_a_shell(
    useful: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/x y.so")
    assert main(["env"]) == 0
    comment, line = capsys.readouterr().out.splitlines()
    assert comment.startswith("# malloc hook: on, nvidia-fs is loaded")
    value = f"{malloc_hook.LIBRARY.path} /x y.so"
    assert shlex.split(line) == ["export", f"LD_PRELOAD={value}"]
    assert main(["env", "--preload", "never"]) == 0
    assert capsys.readouterr().out == "# malloc hook: off, preload=never\n"
