"""DeepSpeed's pipeline on two real ranks (gloo), started as a user starts them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ssdtrain.tools.cli import main
from ssdtrain.train.launch import free_port
from tests.ranks import LONGEST_S

pytest.importorskip("deepspeed")

ROOT = Path(__file__).parents[3]
LAUNCH = ROOT / "launch"
TINY = (
    "model.hidden_size=32",
    "model.num_layers=4",
    "model.num_heads=2",
    "model.sequence_length=16",
    "data.max_bytes=100000",
    "train.micro_batch_size=2",
    "train.tensorboard=false",
    "offload.min_bytes=0",
    "offload.window_bytes=16384",
    "offload.plan=offload-all",
)


def started(directory: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """A tiny training in a directory of its own."""
    words = [*TINY, f"data.cache_directory={directory / 'cache'}", "train.steps=4"]
    paths = [str(LAUNCH), str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = {"PATH": ":".join(paths), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*command, *words],
        cwd=directory,
        env={**os.environ, **environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
    )


def headline(directory: Path) -> subprocess.CompletedProcess[str]:
    """`deepspeed --config ssdtrain.yaml model=gpt offload=ssd`, smaller."""
    for _ in range(5):
        port = ("--master_port", str(free_port()))
        words = ("--config", "ssdtrain.yaml", "model=gpt", "offload=ssd")
        saved = "train.checkpoint_every=2"
        done = started(directory, str(LAUNCH / "deepspeed"), *port, *words, saved)
        if "EADDRINUSE" not in done.stderr:  # another process took the port
            break
    return done


def result(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "runs" / "latest" / "result.json").read_text())


def losses(directory: Path, leg: str) -> list[float]:
    return result(directory)["legs"][leg]["losses"]


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_two_stages_equal_losses_and_exact_resume(tmp_path: Path) -> None:
    done = headline(tmp_path)
    assert done.returncode == 0, done.stderr
    found = result(tmp_path)
    assert found["num_ranks"] == 2
    with_ = found["legs"]["with ssdtrain"]
    # A disk under load may write nothing before backward asks for it.
    written = with_["totals"]["bytes_written"]
    assert found["verdict"] == {
        "losses_equal": True,
        "weights_equal": True,
        **({"writes_confirmed": True} if written else {}),
    }
    assert with_["totals"]["bytes_offloaded"] > 0
    without = found["legs"]["without ssdtrain"]
    for less, more in zip(with_["peak_bytes"], without["peak_bytes"], strict=True):
        assert 0 < less < more
    assert "verified: losses equal" in done.stdout

    # From the checkpoint of step 2 the last two steps come out as they did.
    checkpoints = tmp_path / "runs" / "latest" / "checkpoints"
    (checkpoints / "latest").write_text("step2")
    ssdtrain = (sys.executable, "-m", "ssdtrain", "train")
    rest = ("train.compare=false", f"train.resume={checkpoints}")
    again = started(tmp_path, *ssdtrain, *rest)
    assert again.returncode == 0, again.stderr
    assert losses(tmp_path, "with ssdtrain") == with_["losses"][2:]


def test_a_rank_ends_behind_its_exit_handlers_with_its_status() -> None:
    """Nothing is destroyed: DeepSpeed's modules hold groups whose threads may abort."""
    words = """if True:
        import atexit
        from ssdtrain.train.ranks import end_process
        class Held:
            def __del__(self): print("destroyed")
        held = Held()
        atexit.register(print, "ran")
        end_process(3)"""
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (3, "ran\n", "")


def test_stages_that_do_not_fit_fail_before_any_rank_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("engine.num_stages=3", "engine.num_ranks=2")
    assert main(["train", *TINY, *words]) == 2
    told = "engine.num_stages=3 must divide the number of ranks, got 2"
    assert told in capsys.readouterr().err
