"""The wheel in a virtual environment of its own, far from the checkout."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

import ssdtrain

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    "engine=plain offload=host offload.min_bytes=0 train.steps=1 size.hidden_size=32 "
    "size.num_layers=2 size.num_heads=2 size.sequence_length=16 data.max_bytes=50000 "
    "train.tensorboard=false data.cache_directory=cache --quiet"
).split()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make dist` builds."""
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    [found] = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def home(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel; its dependencies are those of this one."""
    pytest.importorskip("pip")
    directory = tmp_path_factory.mktemp("fresh") / "venv"
    venv = [sys.executable, "-m", "venv", "--without-pip", str(directory)]
    subprocess.run(venv, check=True)
    python = directory / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps"]
    subprocess.run([*pip, "--quiet", "--no-index", str(wheel)], check=True)
    [site] = directory.glob("lib/python*/site-packages")
    # Behind the wheel; the editable install there is a .pth, which is not read here.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return directory


def call(home: Path, *words: str, tool: str = "ssdtrain", **more: str) -> str:
    """A tool of the environment, in a directory with nothing in it.

    Args:
        more: environment variables.
    """
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [str(home / "bin" / tool), *words],
        cwd=home.parent,
        env={**inherited, "OMP_NUM_THREADS": "1", **more},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_is_in_it(wheel: Path) -> None:
    assert wheel.name.startswith(f"ssdtrain-{ssdtrain.__version__}-py3-")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    patterns = {"configs": "**/*.yaml", "launch": "*", "recipes": "*.py"}
    for kind, pattern in patterns.items():
        files = [p for p in (ROOT / kind).glob(pattern) if p.is_file()]
        assert files
        for path in files:
            assert f"ssdtrain/{path.relative_to(ROOT)}" in names
    assert not [n for n in names if n.startswith(("tests", "docs", "recipes"))]


def test_it_works_far_from_the_checkout(home: Path) -> None:
    assert call(home, "--version") == f"ssdtrain {ssdtrain.__version__}\n"
    commands = (
        ["paths", "launch"],
        ["train", "--cfg", "job", "gnn=rgcn"],
        ["train", *TINY],
        ["report", "latest"],
        ["doctor", "--no-measure", "--json"],
    )
    code = (  # one process: importing torch takes seconds
        "from ssdtrain.tools.cli import main\n"
        f"for words in {commands!r}:\n"
        "    assert main(words) == 0\n"
        "    print('==')\n"
    )
    told = call(home, "-c", code, tool="python").split("==\n")
    launch = Path(told[0].strip())
    assert launch.is_relative_to(home)
    assert os.access(launch / "deepspeed", os.X_OK)
    assert "hector.train.NodeClassificationTrainer" in told[1]
    assert "verified: losses equal" in told[2]
    assert "SSDTRAIN is not set" in told[4]
    page = home.parent / "runs" / "latest" / "report.html"
    assert "<h3>Loss by step</h3>" in page.read_text()


IS_ACTIVE = "import sys; print('ssdtrain.integrations.autoload' in sys.modules)"
IN_A_CHILD = (
    f"import subprocess, sys; subprocess.run([sys.executable, '-c', {IS_ACTIVE!r}])"
)
FACTORIES = """
import os
from importlib.metadata import entry_points
from ssdtrain.tools.cli import main
from transformers.trainer import DEFAULT_CALLBACKS
print(DEFAULT_CALLBACKS)
for kind in "pytorch", "fabric":
    [ours] = entry_points(group=f"lightning.{kind}.callbacks_factory", name="ssdtrain")
    os.environ.pop("SSDTRAIN", None)
    print([type(each).__name__ for each in ours.load()()])
    os.environ["SSDTRAIN"] = "fit"
    print([type(each).__name__ for each in ours.load()()])
main(["doctor", "--no-measure", "--json"])
"""


def test_the_autoload(home: Path) -> None:
    def active(*words: str, **more: str) -> str:
        return call(home, *words, tool="python", **more).strip()

    assert active("-c", IS_ACTIVE) == "False"
    assert active("-c", IS_ACTIVE, SSDTRAIN="") == "False"
    assert active("-c", IS_ACTIVE, SSDTRAIN="fit") == "True"
    assert active("-I", "-c", IS_ACTIVE, SSDTRAIN="fit") == "True"
    assert active("-c", IN_A_CHILD, SSDTRAIN="fit") == "True"
    assert active("-S", "-c", IS_ACTIVE, SSDTRAIN="fit") == "False"


def test_trainers_get_their_callbacks(home: Path) -> None:
    """And `doctor` says so. One process: importing the trainers takes seconds."""
    if find_spec("lightning") is None:
        pytest.skip("lightning is not installed")
    found = call(home, "-c", FACTORIES, tool="python", SSDTRAIN="fit")
    # Where the autoload is not active, nothing can have changed this.
    told, *factories = found.splitlines()[:5]
    assert "integrations.transformers.Default" in told
    names = ["LightningCallback", "FabricCallback"]
    assert factories == [line for name in names for line in ("[]", f"['{name}']")]
    assert "SSDTRAIN='fit' is active" in found


def test_uninstalling_leaves_nothing(home: Path) -> None:
    """The last test of this file: the environment is of no use behind it."""
    [site] = home.glob("lib/python*/site-packages")
    assert (site / "ssdtrain_autoload.pth").is_file()
    pip = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python")]
    subprocess.run([*pip, "uninstall", "--yes", "ssdtrain"], check=True)
    left = [
        p for p in site.rglob("*.p*") if p.suffix != ".pyc" and "ssdtrain" in str(p)
    ]
    assert left == []
    done = call(home, "-c", IS_ACTIVE, tool="python", SSDTRAIN="fit")
    assert done.strip() == "False"
