"""DeepSpeed's pipeline on two real ranks (gloo), started as a user starts them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
    f"data.files=[{ROOT / 'README.md'}]",
    "train.micro_batch_size=2",
    "train.tensorboard=false",
    "offload.min_bytes=0",
    "offload.window_bytes=16384",
    "offload.plan=offload-all",
)


def start(directory: Path, *command: str) -> subprocess.Popen[str]:
    """A tiny training in a directory of its own, which has begun."""
    words = [*TINY, f"data.cache_directory={directory / 'cache'}"]
    paths = [str(LAUNCH), str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = {"PATH": ":".join(paths), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [*command, *words],
        cwd=directory,
        env={**os.environ, **environment, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def headline(directory: Path) -> str:
    """What `deepspeed --config ssdtrain.yaml model=gpt offload=ssd` prints, smaller."""
    for _ in range(5):
        port = ("--master_port", str(free_port()))
        words = ("--config", "ssdtrain.yaml", "model=gpt", "offload=ssd")
        steps = ("train.checkpoint_every=2", "train.steps=4")
        run = start(directory, str(LAUNCH / "deepspeed"), *port, *words, *steps)
        with ended(run):
            out, error = run.communicate(timeout=LONGEST_S)
        if "EADDRINUSE" not in error:  # another process took the port
            break
    assert run.returncode == 0, error
    return out


@contextmanager
def ended(run: subprocess.Popen[str]) -> Iterator[None]:
    """Nothing of it is left."""
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        run.wait()


def result(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "runs" / "latest" / "result.json").read_text())


def losses(directory: Path) -> dict[int, float]:
    """Of the steps of the last run that have ended, with ssdtrain."""
    path = directory / "runs" / "latest" / "metrics.jsonl"
    whole, _, _ = path.read_text().rpartition("\n") if path.exists() else ("", "", "")
    lines = [json.loads(line) for line in whole.splitlines()]
    return {v["step"]: v["loss"] for v in lines if v["leg"] == "with ssdtrain"}


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_two_stages_equal_losses_exact_resume_and_stop(tmp_path: Path) -> None:
    """What goes on from the second step is stopped: both ranks behind the same step."""
    told = headline(tmp_path)
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
    assert "verified: losses equal" in told

    # From the checkpoint of step 2 the last two steps come out as they did.
    checkpoints = tmp_path / "runs" / "latest" / "checkpoints"
    (checkpoints / "latest").write_text("step2")
    ssdtrain = (sys.executable, "-m", "ssdtrain", "train", "offload=ssd")
    rest = ("train.compare=false", f"train.resume={checkpoints}", "train.steps=100000")
    first = (tmp_path / "runs" / "latest").resolve()
    again = start(tmp_path, *ssdtrain, *rest, "train.checkpoint_every=50000")
    path, until = tmp_path / "runs" / "latest", time.monotonic() + LONGEST_S
    with ended(again):
        while path.resolve() == first or len(losses(tmp_path)) < 3:
            assert again.poll() is None and time.monotonic() < until
            time.sleep(0.1)
        again.terminate()
        _, error = again.communicate(timeout=LONGEST_S)
    assert again.returncode == 128 + signal.SIGTERM, error
    steps = losses(tmp_path)
    assert [steps[2], steps[3]] == with_["losses"][2:]
    said, line = (one for one in error.splitlines() if one.startswith("ssdtrain"))
    assert said == "ssdtrain: SIGTERM: finishing the step"
    assert "stopped by SIGTERM" in line and "go on with" in line
    kept, count = path / "checkpoints", max(steps) + 1
    assert (kept / "latest").read_text() == f"step{count}"
    for part in (f"rank{rank}/tally-{count}.json" for rank in range(2)):
        assert (kept / part).is_file(), part
    assert len(list((kept / f"step{count}").glob("mp_rank_*"))) == 2


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
