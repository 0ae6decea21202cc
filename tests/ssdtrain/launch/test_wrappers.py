"""The launch wrappers hand every word to where it belongs, quoting included."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LAUNCH = ROOT / "launch"
NO_GPU = not Path("/dev/nvidiactl").exists() and not Path("/dev/kfd").exists()
SHOW = '#!/bin/sh\nprintf "%s\\n" "$@"\nprintf "%s\\n" "$0" >&2\n'


@pytest.fixture
def fakes(tmp_path: Path) -> Path:
    """A directory of launchers that print their words, one a line."""
    directory = tmp_path / "real bin"
    directory.mkdir()
    for name in ("deepspeed", "torchrun", "srun"):
        (directory / name).write_text(SHOW)
        (directory / name).chmod(0o755)
    return directory


def call(fakes: Path, name: str, *words: str, **more: str) -> list[str]:
    path = f"{LAUNCH}:{fakes}:/usr/bin:/bin"
    environment = {"PATH": path, **more}
    done = subprocess.run(
        [str(LAUNCH / name), *words], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_headline(fakes: Path) -> None:
    words = "--config ssdtrain.yaml model=gpt offload=ssd".split()
    ranks = ["--num_accelerators", "2"] if NO_GPU else []
    handed = [*ranks, "--module", "ssdtrain", "train", *words]
    assert call(fakes, "deepspeed", *words) == handed
    # For real: tests/ssdtrain/train/test_pipeline.py


@pytest.mark.skipif(not NO_GPU, reason="GPUs can be chosen here")
@pytest.mark.parametrize(
    "flag", [["--include", "localhost:0,1"], ["--include=localhost:0,1"]]
)
def test_choosing_gpus_where_there_are_none(fakes: Path, flag: list[str]) -> None:
    """DeepSpeed's launcher answers with a traceback."""
    words = [str(LAUNCH / "deepspeed"), *flag, "--config", "ssdtrain.yaml"]
    path = f"{LAUNCH}:{fakes}:/usr/bin:/bin"
    done = subprocess.run(words, env={"PATH": path}, capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout
    assert "localhost:0,1 chooses GPUs and this machine has none" in done.stderr


@pytest.mark.parametrize(
    ("words", "flags", "trained"),
    [
        (
            ["--num_gpus", "4", "--config", "x.yaml", "a=1"],
            ["--num_gpus", "4"],
            ["--config", "x.yaml", "a=1"],
        ),
        (
            ["--include", "w0@w1:0,2", "--config=x.yaml", "~b", "--master_port", "1"],
            ["--include", "w0@w1:0,2", "--master_port", "1"],
            ["--config=x.yaml", "~b"],
        ),
        (
            ["-i", "w0", "--config", "my x.yaml", "+a.b=[1, 2]", "-q", "c='d e'"],
            ["-i", "w0", "-q"],
            ["--config", "my x.yaml", "+a.b=[1, 2]", "c='d e'"],
        ),
        (
            ["--launcher_args", "p=q r", "--num_gpus=1", "--config", "x", "a=*"],
            ["--launcher_args", "p=q r", "--num_gpus=1"],
            ["--config", "x", "a=*"],
        ),
    ],
)
def test_flags_and_overrides_part(
    fakes: Path, words: list[str], flags: list[str], trained: list[str]
) -> None:
    expected = [*flags, "--module", "ssdtrain", "train", *trained]
    assert call(fakes, "deepspeed", *words) == expected


@pytest.mark.parametrize(
    "words",
    [
        ["train.py", "--config", "x.json"],
        ["--num_gpus", "2", "train.py", "--config", "x"],
        ["--module", "other", "--config", "x"],
        ["--help"],
        [],
    ],
)
def test_other_peoples_commands_pass_through(fakes: Path, words: list[str]) -> None:
    handed = call(fakes, "deepspeed", *words)
    assert handed == (words or [""])


def test_a_launcher_that_ends_at_once_hands_its_status_on(tmp_path: Path) -> None:
    """It was 129 where the shell had collected it before it was asked for it."""
    real = tmp_path / "deepspeed"
    real.write_text("#!/bin/sh\nexit 3\n")
    real.chmod(0o755)
    words = [str(LAUNCH / "deepspeed"), "--config", "ssdtrain.yaml"]
    path = f"{LAUNCH}:{tmp_path}:/usr/bin:/bin"
    # Many at once: a busy machine is where the shell comes late.
    runs = [subprocess.Popen(words, env={"PATH": path}) for _ in range(40)]
    assert [run.wait() for run in runs] == [3] * len(runs)


@pytest.mark.parametrize(
    ("signum", "status"), [(signal.SIGINT, 7), (signal.SIGTERM, 143)]
)
def test_an_interrupted_run_is_waited_for(
    tmp_path: Path, signum: int, status: int
) -> None:
    """As from a terminal, whose Ctrl-C reaches every process."""
    real = tmp_path / "deepspeed"
    go_on = tmp_path / "go on"
    waiting = f"until [ -e '{go_on}' ]; do sleep 0.02; done"
    real.write_text(f"#!/bin/sh\necho ready\n{waiting}\nexit 7\n")
    real.chmod(0o755)
    words = [str(LAUNCH / "deepspeed"), "--config", "ssdtrain.yaml"]
    path = f"{LAUNCH}:{tmp_path}:/usr/bin:/bin"
    with subprocess.Popen(
        words, env={"PATH": path}, stdout=subprocess.PIPE, start_new_session=True
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == b"ready\n"
        os.killpg(run.pid, signum)
        go_on.touch()
        assert run.wait() == status


def test_torchrun(fakes: Path) -> None:
    words = ["--nproc-per-node", "2", "--config", "x.yaml", "a=1"]
    handed = [*words[:2], "--module", "ssdtrain", "train", *words[2:]]
    assert call(fakes, "torchrun", *words) == handed
    assert call(fakes, "torchrun", "x.py", "--config", "y") == ["x.py", "--config", "y"]


def test_slurm_starts_itself_under_srun_and_then_the_trainer(
    fakes: Path, tmp_path: Path
) -> None:
    job = {"SLURM_JOB_ID": "7", "MASTER_ADDR": "node0"}
    words = ["-N", "2", "--config", "x.yaml", "a=1 2"]
    handed = [*words[:2], str(LAUNCH / "slurm"), *words[2:]]
    assert call(fakes, "slurm", *words, **job) == handed
    python = fakes / "python3"
    python.write_text(
        '#!/bin/sh\nprintf "%s\\n" "$@" "$RANK/$WORLD_SIZE" $LOCAL_RANK\n'
    )
    python.chmod(0o755)
    task = {
        **job,
        "SSDTRAIN_SLURM_TASK": "1",
        "SLURM_PROCID": "3",
        "SLURM_NTASKS": "4",
        "SLURM_LOCALID": "1",
    }
    started = call(fakes, "slurm", *words[2:], **task)
    assert started == ["-m", "ssdtrain", "train", *words[2:], "3/4", "1"]


def test_slurm_outside_an_allocation_says_so(fakes: Path) -> None:
    """It was `SLURM_JOB_NODELIST: parameter not set`, of a shell."""
    done = subprocess.run(
        [str(LAUNCH / "slurm"), "--config", "x"],
        env={"PATH": f"{LAUNCH}:{fakes}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith("slurm: no allocation here") and "sbatch" in line


def test_no_real_launcher_is_said(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(LAUNCH / "deepspeed"), "--config", "x"],
        env={"PATH": f"{LAUNCH}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    if shutil.which("deepspeed", path="/usr/bin:/bin"):
        pytest.skip("a system-wide deepspeed is installed")
    assert done.returncode == 127
    assert "deepspeed: not found on PATH behind" in done.stderr


def test_shellcheck() -> None:
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    files = sorted(map(str, LAUNCH.iterdir()))
    done = subprocess.run(
        [shellcheck, "-x", "-P", str(LAUNCH), *files], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
