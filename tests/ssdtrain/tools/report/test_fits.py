"""Will it fit: the same figures from a few layers as from all, and one answer."""

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ssdtrain.errors import ConfigError
from ssdtrain.plan.baselines import fixed_policies
from ssdtrain.plan.profile import PROFILE_FILE, Profile
from ssdtrain.plan.schedule import schedule
from ssdtrain.plan.simulate import simulate
from ssdtrain.plan.timeline import Timeline
from ssdtrain.quantities import bytes_text
from ssdtrain.tools.cli import main
from ssdtrain.tools.foresight.device import load_device
from ssdtrain.tools.report import build_public, estimate
from ssdtrain.tools.report.build_public import Loss, Shape, Train, shape_of
from ssdtrain.tools.report.capture import Question, captured_step
from ssdtrain.tools.report.fits import (
    CHECKPOINTING,
    CONTEXT,
    OURS,
    PLAIN,
    fits,
    planned,
)
from ssdtrain.tools.report.fits_command import fits_lines, tokens_argument

SMALL = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 9,
    "intermediate_size": 2816,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 4096,
}
H100 = load_device("h100")


LONGEST = "ssdtrain.tools.report.fits._longest"


@pytest.fixture
def as_long_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """No longer sequence is tried, which takes most of the time of an answer."""
    monkeypatch.setattr(LONGEST, lambda *asked: {})


def peaks(profile: Profile) -> dict[str, tuple[float, int]]:
    timeline = Timeline(profile)
    found = {}
    for policy in fixed_policies(timeline):
        orders = schedule(timeline, policy.placements, policy.style)
        outcome = simulate(timeline, orders)
        found[policy.name] = outcome.step_ms, outcome.peak_bytes
    return found


@pytest.mark.parametrize("train", list(Train))
def test_a_deep_model_is_a_few_layers_repeated(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tensor of every layer is there, and each policy costs the same."""
    question = Question(model="x", train=train, tokens=4096)
    shape = Shape(SMALL, train, Loss.STOCK)
    short = captured_step(question, shape, H100, 4096)
    monkeypatch.setattr(Shape, "num_layers", None)  # all of them are captured
    long = captured_step(question, shape, H100, 4096)
    assert short.weights == long.weights and short.optimizer == long.optimizer
    ours, theirs = short.profile, long.profile
    assert len(ours.marks) == len(theirs.marks)
    for kind, items in theirs.kinds.items():
        sizes = [item.num_bytes for item in items]
        assert [item.num_bytes for item in ours.kinds[kind]] == sizes
        assert len(ours.regions[kind]) == len(theirs.regions[kind]) == 9
    assert PROFILE_FILE.from_json(PROFILE_FILE.to_json(ours)).kinds == ours.kinds
    theirs_by = peaks(theirs)
    for name, (ms, peak) in peaks(ours).items():
        assert ms == pytest.approx(theirs_by[name][0], rel=0.02), name
        assert peak == pytest.approx(theirs_by[name][1], rel=0.03), name


def test_one_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(SMALL))
    answer = fits(Question(model=str(file), tokens=8192))
    weights = answer.weight_bytes
    assert answer.gradient_bytes == weights and answer.optimizer_bytes == 2 * weights
    plain, again = answer.way(PLAIN), answer.way(CHECKPOINTING)
    ours = answer.way(OURS)
    assert plain is not None and again is not None and ours is not None
    assert plain.fits and ours == replace(plain, name=OURS)
    assert plain.step_ms < again.step_ms and plain.memory_bytes > again.memory_bytes
    assert answer.longest[PLAIN] < answer.longest[CHECKPOINTING]
    assert answer.sentence.startswith("Plain training fits")
    long = fits(Question(model=str(file), tokens=2 * answer.longest[PLAIN]))
    rows = {way.name: way for way in long.ways}
    assert not rows[PLAIN].fits and rows[OURS].fits
    assert rows[OURS].step_ms <= rows[CHECKPOINTING].step_ms
    told = "\n".join(fits_lines(long))
    assert "does not fit" in told and long.sentence in told
    assert long.longest[OURS] >= long.tokens, "it fits"
    assert long.traffic is not None
    assert long.traffic.moved_bytes + long.traffic.again_bytes > 0
    assert f"Host memory needed: {bytes_text(long.traffic.host_bytes)}." in told
    assert "--loss fused asks" in told
    moved = replace(long, traffic=replace(long.traffic, again_bytes=0))
    assert "and back, and computes nothing again." in "\n".join(fits_lines(moved))
    rest = long.weight_bytes + long.optimizer_bytes + long.activation_bytes
    assert rest == rows[PLAIN].memory_bytes, "what is told of plain training adds up"
    assert len(told.splitlines()) <= 24 and max(map(len, fits_lines(long))) <= 120
    # Inputs of layers may leave as well: more fits than with checkpointing.
    most = long.longest[OURS]
    assert most > long.longest[CHECKPOINTING]
    larger = fits(Question(model=str(file), tokens=most + 8 * CONTEXT))
    ours, again = larger.way(OURS), larger.way(CHECKPOINTING)
    assert ours is not None and again is not None and not ours.fits
    assert ours.memory_bytes < 0.95 * again.memory_bytes
    assert abs(larger.longest[OURS] - most) <= CONTEXT, "it was what is told now"


def test_a_plan_of_a_deep_model_is_searched_as_well() -> None:
    """What is computed again is so because the memory is used."""
    name, device = "llama-3.1-70b", load_device("h200")
    question = Question(model=name, gpu="h200", gpus=8, fsdp=True)
    shape = shape_of(name, Train.FULL, Loss.STOCK)
    capacity = int(device.spec.memory_bytes)
    _, peak, traffic = planned(captured_step(question, shape, device, 8192), capacity)
    assert traffic.again_bytes > 0 and 0.9 * capacity < peak < capacity


@pytest.mark.usefixtures("as_long_as_asked")
def test_steps_that_the_host_bounds_are_told(tmp_path: Path) -> None:
    """A short step of many kernels waits for the host, a long one does not."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    for tokens, is_bound in ((512, True), (262144, False)):
        answer = fits(Question(model=str(path), train=Train.FULL, tokens=tokens))
        told = [line for line in fits_lines(answer) if "for the host" in line]
        assert answer.is_bound_by_host == is_bound == bool(told)


def test_weights_that_do_not_fit_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["fits", "llama-3.1-70b", "--gpu", "h200", "--gpus", "8"]) == 2
    told = capsys.readouterr().err
    assert "does not fit: weights 141.11 GB" in told
    assert "try --gpus 8 --fsdp" in told, "where the states do fit"
    assert main(["fits", "qwen3-14b", "--gpu", "h100"]) == 2
    told = capsys.readouterr().err
    assert "gradients 29.54 GB" in told, "they are all there when backward ends"


def test_options_that_would_be_ignored_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["fits", "qwen3-8b", "--micro-batch", "4"]) == 2
    assert "for FILE.py:FUNCTION; give --tokens" in capsys.readouterr().err
    assert main(["fits", "my.py:build", "--tokens", "4k"]) == 2
    assert "for public models; give --micro-batch" in capsys.readouterr().err
    assert main(["fits", "my.py", "--micro-batch", "4"]) == 2
    assert "name its function, such as my.py:build" in capsys.readouterr().err


def test_slips_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'qwen3-8b'"):
        shape_of("Qwen/Qwen3-8b-base", Train.FULL, Loss.STOCK)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="with a model_type"):
        shape_of(str(tmp_path), Train.FULL, Loss.STOCK)
    with pytest.raises(ConfigError, match="gpus of 2 or more"):
        Question(model="qwen3-8b", fsdp=True)
    assert tokens_argument("32k") == 32768
    with pytest.raises(argparse.ArgumentTypeError, match="such as 8192 or 32k"):
        tokens_argument("many")


def test_the_local_cache_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    place = tmp_path / "models--Me--Mine" / "snapshots" / "abc"
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(SMALL))
    assert shape_of("Me/Mine", Train.FULL, Loss.STOCK).num_layers == 9


def test_short_steps_save_nothing_large_enough_to_run_again(tmp_path: Path) -> None:
    """At a fifth of the tokens no region has a tensor that counts."""
    small = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(SMALL | small))
    answer = fits(Question(model=str(tmp_path), train=Train.FULL, tokens=2048))
    most = [answer.longest[name] for name in (PLAIN, CHECKPOINTING, OURS)]
    assert 2048 < most[0] < most[1] <= most[2]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_attention_heads": 7}, "cannot build llama: .* is not a multiple of"),
        ({"num_hidden_layers": "four"}, "cannot build llama: .* expected int, got str"),
        ({"model_type": "frobnicate"}, "cannot build frobnicate: .*FILE.py:FUNCTION"),
        ({"model_type": "llava"}, "cannot build llava: .*FILE.py:FUNCTION"),
        ({"model_type": "bart"}, "bart has an encoder and a decoder"),
        ({"model_type": "whisper", "vocab_size": 9}, "cannot build whisper: .*Padding"),
    ],
)
def test_what_transformers_cannot_build(
    changes: dict[str, object], told: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL | changes))
    with pytest.raises(ConfigError, match=told):
        fits(Question(model=str(tmp_path), train=Train.FULL, tokens=64))


def test_every_short_name_can_be_built() -> None:
    """Gemma 2 has no fused attention in transformers."""
    for name in build_public.PUBLIC:
        shape = shape_of(name, Train.FULL, Loss.STOCK)
        few = shape if shape.num_layers is None else shape.with_layers(2)
        with torch.device("meta"):
            subject = build_public.public_subject(few, 1024)
        assert sum(p.numel() for p in subject.model.parameters()) > 10**7


def test_the_fused_loss_makes_its_gradients_in_forward() -> None:
    hidden = torch.randn(6, 4, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(9, 4, dtype=torch.bfloat16, requires_grad=True)
    loss = build_public.FusedLoss.apply(hidden, weight, torch.zeros(6).long())
    loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    assert hidden.grad.shape == hidden.shape and weight.grad.shape == weight.shape


MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(2048), nn.Linear(2048, 8192)
        self.down = nn.Linear(8192, 2048)
    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def build(micro_batch):
    net = Net().to(torch.bfloat16)
    x = torch.zeros(micro_batch, 8192, 2048, dtype=torch.bfloat16)
    return net, lambda: net(x).square().mean()
"""


def test_plan_refuses_what_cannot_fit_and_never_loses_to_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.py").write_text(MODEL)
    command = ["plan", "--model", "my.py:build", "--no-gpu", "--device", "h100"]
    assert main([*command, "--device-memory", "1GB"]) == 2
    assert "weights, gradients and optimizer take" in capsys.readouterr().err
    assert main([*command, "--memory-budget", "1200MB"]) == 0
    told = capsys.readouterr().out
    chosen = float(told.partition("as predicted: step ")[2].split()[0])
    units = {"GB": 1e9, "MB": 1e6}
    found = re.findall(r"^  [ox] +([\d.]+) (GB|MB) +([\d.]+) ms", told, re.M)
    assert len(found) > 4
    for size, unit, ms in found:
        assert float(size) * units[unit] > 1.2e9 or float(ms) >= 0.99 * chosen


def test_a_users_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.py").write_text(MODEL)
    answer = fits(Question(model="my.py:build", micro_batch=2))
    assert answer.way(CHECKPOINTING) is not None
    most = answer.longest
    assert 2 < most[PLAIN] < most[CHECKPOINTING] <= most[OURS]
    told = "\n".join(fits_lines(answer))
    assert "a micro-batch of 2, h100" in told and "tokens/s" not in told
    assert f"Largest micro-batch that fits: plain {most[PLAIN]:,}, check" in told
    # What is told is true: so many fit, and a tenth more do not.
    for name, share, it_fits in ((PLAIN, 1.0, True), (CHECKPOINTING, 1.1, False)):
        question = Question(model="my.py:build", micro_batch=int(share * most[name]))
        with monkeypatch.context() as no_longer:
            no_longer.setattr(LONGEST, lambda *asked: {})
            way = fits(question).way(name)
        assert way is not None and way.fits is it_fits, (name, share)
    # Nor does it matter much where one begins to ask.
    first = fits(Question(model="my.py:build", micro_batch=1)).longest
    assert first == pytest.approx(most, rel=0.1)
    fixed = MODEL.replace("torch.zeros(micro_batch,", "torch.zeros(4,")
    Path("fixed.py").write_text(fixed)
    assert fits(Question(model="fixed.py:build")).longest == {}


@pytest.mark.usefixtures("as_long_as_asked")
def test_three_commands_tell_the_same_of_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`fits`, `foresight predict` and `plan --no-gpu`: memory and step of plain
    training."""
    monkeypatch.chdir(tmp_path)
    Path("my.py").write_text(MODEL)
    plain = fits(Question(model="my.py:build", micro_batch=2)).way(PLAIN)
    assert plain is not None
    given = [*("--model", "my.py:build", "--micro-batch", "2"), "--device", "h100"]
    given += ["--optimizer", "adamw"]
    assert main(["foresight", "predict", *given, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert plain.memory_bytes == pytest.approx(told["peak_bytes"], rel=0.02)
    assert plain.step_ms == pytest.approx(told["step_us"] / 1e3, rel=0.01)
    room = ["--device-memory", bytes_text(int(1.1 * told["peak_bytes"]))]
    assert main(["plan", *given, "--no-gpu", *room]) == 0
    kept = re.search(r"as predicted: step ([\d.]+) ms", capsys.readouterr().out)
    assert kept is not None
    assert plain.step_ms == pytest.approx(float(kept[1]), rel=0.01)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("my.py", "name its function, such as my.py:build"),
        ("my.py:builds_nothing", "my.py has no function 'builds_nothing'"),
        ("none.py:build", "none.py:build: there is no file"),
        ("my.py:nothing", "my.py:nothing expects a function of one argument"),
        ("my.py:Net", "my.py:Net expects a function of one argument"),
        ("my.py:alone", r"my.py:alone: .*expects to give \(module, forward\)"),
        (
            "my.py:small",
            "nothing is worth moving; give more --tokens or a larger --micro-batch",
        ),
    ],
)
def test_slips_in_a_users_file(
    text: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    more = """
def nothing():
    return build(1)

def alone(micro_batch):
    return build(micro_batch)[0]

def small(micro_batch):
    net = nn.Linear(8, 8)
    return net, lambda: net(torch.zeros(4, 8)).sum()
"""
    Path("my.py").write_text(MODEL + more)
    with pytest.raises(ConfigError, match=told):
        fits(Question(model=text))


MAMBA2 = {"num_heads": 2, "head_dim": 64, "n_groups": 1}


@pytest.mark.parametrize(("kind", "more"), [("mamba", {}), ("mamba2", MAMBA2)])
def test_a_scan_is_one_kernel(kind: str, more: dict[str, int], tmp_path: Path) -> None:
    """Tokens are no operators: a longer sequence takes no more of them."""
    found = {}
    for length in (8192, 16384):
        path = tmp_path / "config.json"
        settings = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 256}
        path.write_text(json.dumps({"model_type": kind, **settings, **more}))
        question = Question(model=str(path), tokens=length)
        shape = shape_of(str(path), Train.FULL, Loss.STOCK)
        found[length] = captured_step(question, shape, H100, length)
    assert found[8192].num_operators == found[16384].num_operators < 700
    assert any("mamba_ssm" in each for each in found[8192].caveats)
    # Nothing is saved for every state of every token: that would be 128 x 16 wide.
    items = found[16384].profile.kinds["model/0"]
    assert max(each.num_bytes for each in items) <= 16384 * 512 * 4


LOOP = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))

    def forward(self, x):
        for _ in range(100_000):
            x = x * self.weight
        return x.sum()

def build(micro_batch):
    model, x = Net(), torch.zeros(micro_batch, 8)
    return model, lambda: model(x)
"""


def test_a_loop_over_tokens_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate, "MOST_OPERATORS", 300)
    (tmp_path / "my.py").write_text(LOOP)
    with pytest.raises(ConfigError, match=r"more than 300 operators.*a loop over tok"):
        fits(Question(model=f"{tmp_path}/my.py:build"))


@pytest.mark.usefixtures("as_long_as_asked")
def test_values_narrower_than_keys_are_captured(tmp_path: Path) -> None:
    """As DeepSeek's latent attention has them."""
    (tmp_path / "my.py").write_text(
        """
import torch
from torch.nn import functional as F

def build(micro_batch):
    model = torch.nn.Linear(64, 64 + 64 + 32).bfloat16()
    x = torch.zeros(micro_batch, 1024, 64, dtype=torch.bfloat16)
    def forward():
        parts = model(x).split([64, 64, 32], -1)
        heads = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in parts)
        out = F.scaled_dot_product_attention(*heads, is_causal=True)
        assert out.shape == (micro_batch, 2, 1024, 16)
        return out.float().square().mean()
    return model, forward
"""
    )
    answer = fits(Question(model=f"{tmp_path}/my.py:build", micro_batch=64))
    assert answer.activation_bytes < 1e9, "no scores in memory"
