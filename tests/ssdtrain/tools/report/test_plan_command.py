"""`ssdtrain plan` and `ssdtrain rok`, and the estimate without a GPU."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import ssdtrain
from ssdtrain.plan.choose import choose
from ssdtrain.plan.goal import Goal
from ssdtrain.plan.placement import Placement
from ssdtrain.plan.plan import read_plan
from ssdtrain.plan.profile import Phase
from ssdtrain.tools.cli import main
from ssdtrain.tools.foresight.device import DeviceCosts, write_device
from ssdtrain.tools.foresight.host import HostTable
from ssdtrain.tools.foresight.spec import H200, links_of
from ssdtrain.tools.machine.links import LINK_FILE, LinkFile, LinkKind
from ssdtrain.tools.report.estimate import estimate
from ssdtrain.tools.report.subject import Blocks, build_of, estimated
from tests.ssdtrain.tools.machine.made import link

TINY = ["--model", "blocks:64x2", "--micro-batch", "2", "--sequence", "32"]
SMALL = [*TINY, "--min-bytes", "1k"]


def rated_device(tflops: float, memory_gb_per_s: float) -> DeviceCosts:
    """A device that reaches two known rates, and takes no host time."""
    rates = {"memory_gb_per_s": memory_gb_per_s, "tflops": {"fp32": tflops}}
    spec = replace(H200, name="rated", l2_bytes=0.0, **rates)
    return DeviceCosts(spec=spec, host=HostTable([]), host_scale=0.0, reached=1.0)


RATES = rated_device(600.0, 3500.0)


def link_file(path: Path, *kinds: LinkKind, gb_per_s: float = 10.0) -> str:
    sizes = [1 << n for n in range(12, 28)]
    links = tuple(link(kind, gb_per_s, sizes, start_s=1e-5) for kind in kinds)
    LINK_FILE.write(path, LinkFile(created_utc="now", links=links))
    return str(path)


def test_the_estimate_counts_what_autograd_saves() -> None:
    """The blocks of bench/offload/placement.py: 18 807 259 136 bytes on an H200."""
    profile = estimated(
        build_of("blocks:8192x4", 1024), 16, links_of(H200), RATES, 1 << 20
    )
    assert profile.saved_bytes == 18_807_259_136
    # The product with one that makes the input needs a gradient is the only extra.
    gemms = 3 * 4 * 12 * 2 * 16 * 1024 * 8192**2
    attention = 3.5 * 4 * 2 * 2 * 16 * 1024**2 * 8192
    least_ms = (gemms + attention) / (600.0 * 1e9)
    assert least_ms < profile.compute_ms < 1.25 * least_ms


def test_the_estimate_follows_sizes_and_memory() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.GELU())
        x = torch.empty(1024, 256, requires_grad=True)
        profile, *_ = estimate(
            model,
            lambda: model(x * 1).sum(),
            links_of(H200),
            rated_device(1.0, 1e9),
            min_bytes=1,
        )
    names = [item.name.split()[0] for item in profile.kinds["model/0"]]
    assert names == ["MulBackward0", "MmBackward0"]
    flops = 2 * 1024 * 256 * 256
    forward = [mark.ms for mark in profile.marks if mark.phase is Phase.FORWARD]
    assert forward[0] == pytest.approx(flops / 1e9, rel=0.01)


def test_plan_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    links = link_file(tmp_path / "links.json", LinkKind.D2H, LinkKind.H2D)
    saved = tmp_path / "plan.json"
    profile = tmp_path / "profile.json"
    command = ["plan", *SMALL, "--no-gpu", "--links", links, "--max-overhead", "0.5"]
    command += ["--save", str(saved), "--save-profile", str(profile)]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "blocks.0.qkv" in text and "Next:" in text and "full recompute" in text
    plan = read_plan(saved)
    assert main(["plan", "--profile", str(profile), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["schema"] == "ssdtrain-plan"
    assert plan.prediction is not None
    assert plan.prediction.peak_bytes <= plan.prediction.keep_peak_bytes
    budget = str(10 * plan.prediction.keep_peak_bytes)
    rest = ["--memory-budget", budget, "--json"]
    assert main(["plan", "--profile", str(profile), *rest]) == 0
    assert json.loads(capsys.readouterr().out)["policy"] == "keep-all"


def test_plan_observes_and_the_plan_can_be_trained_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "plan.json"
    assert main(["plan", *SMALL, "--max-overhead", "1", "--save", str(saved)]) == 0
    assert "Plan (" in capsys.readouterr().out
    subject = build_of("blocks:64x2", 32)(2)
    with ssdtrain.offload(
        subject.model, target="host", min_bytes=1024, plan=str(saved)
    ) as session:
        subject.forward().backward()
        report = session.last_step
        assert report is not None and not report.fallbacks
        assert session.plan == read_plan(saved)


def test_a_model_of_the_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\n"
        "def build(n):\n"
        "    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(),"
        " torch.nn.Linear(64, 64))\n"
        "    x = torch.zeros(n, 64, requires_grad=True)\n"
        "    return net, lambda: net(x * 2).sum()\n"
    )
    command = ["plan", "--model", f"{path}:build", "--micro-batch", "64"]
    command += ["--min-bytes", "1k", "--no-gpu", "--json"]
    assert main(command) == 0
    assert len(json.loads(capsys.readouterr().out)["orders"]["model/0"]) == 3


def test_sweep_weighs_size_against_bubbles(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", *SMALL, "--no-gpu", "--sweep", "micro_batch"]
    command += ["--batch", "4", "--stages", "2", "--json"]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert [entry["micro_batch"] for entry in found] == [1, 2, 4]
    assert [entry["in_flight"] for entry in found] == [2, 2, 1]
    assert [entry["bubble"] for entry in found] == pytest.approx([1 / 5, 1 / 3, 1 / 2])
    assert main([*command[:-1], "--memory-budget", "1k"]) == 0
    assert "does not fit" in capsys.readouterr().out


def test_rok_predicts_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "rok.png"
    command = ["rok", "--model", "blocks:8192x3", "--sequence", "1024", "--no-gpu"]
    command += ["--batches", "8", "16", "--plot", str(picture)]
    assert main(command) == 0
    assert "recompute" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main([*command[:-2], "--json"]) == 0
    points = {
        (p["strategy"], p["batch"]): p for p in json.loads(capsys.readouterr().out)
    }
    assert len(points) == 6
    for batch in (8, 16):
        keep, moved = points["keep", batch], points["offload", batch]
        assert moved["peak_gb"] < keep["peak_gb"]
        assert moved["tflops"] > 0.98 * keep["tflops"]
        assert points["recompute", batch]["tflops"] < 0.8 * keep["tflops"]


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["plan"], "expects --profile runs/latest/profile.json or --model"),
        (["plan", "--model", "blocks:8192"], "HIDDENxLAYERS"),
        (["plan", "--model", "nothing"], "FILE.py:FUNCTION"),
        (["plan", "--model", "absent.py:build"], "there is no file /"),
        (["plan", *TINY, "--no-gpu"], "min-bytes"),
        (["plan", *SMALL, "--no-gpu", "--memory-budget", "1"], "least reachable peak"),
        (["plan", *SMALL, "--no-gpu", "--target", "ssd"], "--links"),
        (
            ["plan", *SMALL, "--no-gpu", "--links", "absent.json"],
            "doctor --save absent",
        ),
        (["plan", "--profile", "absent.json"], "--profile absent.json: No such file"),
        (["foresight", "predict", "--graph", "a", "b"], "--graph a: No such file"),
        (["foresight", "shard", "--tables", "a"], "--tables a: No such file"),
        (["foresight", "predict", "--device", "/a"], "no device '/a'"),
        (["project", "--plot", "/proc/x.png"], "/proc/x.png: No such file"),
        (["plan", "--profile", "p", "--sweep", "micro_batch"], "needs --model"),
        (["rok"], "--model expects blocks:4096x32"),
    ],
)
def test_input_that_cannot_work(
    command: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 2
    assert says in capsys.readouterr().err


def test_a_leaf_of_the_caller_is_in_no_estimate() -> None:
    with torch.device("meta"):
        model = Blocks(256, 2).train()
        x = torch.zeros(2, 128, 256, dtype=torch.bfloat16, requires_grad=True)
        own, *_ = estimate(model, lambda: model(x), links_of(H200), RATES, min_bytes=1)
        new, *_ = estimate(
            model, lambda: model(x * 1), links_of(H200), RATES, min_bytes=1
        )
    leaf, first = own.items_of(0)[0], new.items_of(0)[0]
    assert leaf.num_bytes == first.num_bytes == x.nbytes
    assert leaf.held and not first.held
    plans = [choose(p, Goal(max_overhead=0.0)).prediction for p in (own, new)]
    assert plans[0] is not None and plans[1] is not None
    assert plans[0].keep_peak_bytes == plans[1].keep_peak_bytes - x.nbytes
    moved = choose(own, Goal(max_overhead=100.0))
    assert moved.orders["model/0"][0].placement is Placement.KEEP
    assert any(i.recipe and i.inputs == (0,) for i in own.items_of(0)), "the norm's"


def test_a_plan_that_moves_nothing_does_not_blame_rebuilding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step of less than a millisecond hides no copy, whatever is rebuilt."""
    model = "blocks:1024x2 --micro-batch 1 --sequence 512 --no-gpu".split()
    device = str(tmp_path / "rates.json")
    write_device(device, RATES)
    assert main(["plan", "--model", *model, "--device", device]) == 0
    text = capsys.readouterr().out
    assert "Moved 0 B out and 0 B back" in text
    assert "Next: nothing is moved" in text and "rebuilding;" not in text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def build(\n", "cannot be imported: SyntaxError: '(' was never closed"),
        (
            "\nimport nothing_such\n",
            "No module named 'nothing_such' (mine.py, line 2).",
        ),
    ],
)
def test_a_file_that_cannot_be_imported_is_told_in_a_line(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was a traceback through importlib."""
    (tmp_path / "mine.py").write_text(text)
    assert main(["plan", "--model", f"{tmp_path / 'mine.py'}:build", "--no-gpu"]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert says in line
