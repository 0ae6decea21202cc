"""Loops that are not ours: transformers.Trainer, Accelerate, Lightning.

Each script is run as it stands and with two lines changed; losses and weights are equal
bit by bit and fewer saved bytes are alive.
"""

import difflib
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ssdtrain
from ssdtrain.errors import AttachError, ConfigError
from ssdtrain.train.memory import SavedObserver
from tests.ranks import run_ranks
from tests.ssdtrain.written import written_before_backward

MODEL = """
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, use_cache=False,
)
model = LlamaForCausalLM(config)
tokens = torch.randint(0, 128, (32, 64))
"""
LORA = """
from peft import LoraConfig, get_peft_model

lora = LoraConfig(target_modules=["q_proj", "v_proj"], r=4, lora_dropout=0.1)
model = get_peft_model(model, lora)
"""
TRAINER = """
from transformers import Trainer, TrainingArguments

args = TrainingArguments(
    output_dir="out", max_steps=3, per_device_train_batch_size=2,
    gradient_accumulation_steps=4, logging_steps=1, learning_rate=1e-2,
    eval_strategy="steps", eval_steps=1, report_to=[], disable_tqdm=True,
    save_strategy="no", use_cpu=True, dataloader_pin_memory=False,
)
data = [{"input_ids": row, "labels": row} for row in tokens]
trainer = Trainer(
    model=model, args=args, train_dataset=data, eval_dataset=data[:4],
)
trainer.train()
losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
losses += [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
"""
ACCELERATE = """
from accelerate import Accelerator

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = torch.utils.data.DataLoader(tokens, batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
"""
LIGHTNING = """
import lightning

losses = []


class Task(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = model

    def training_step(self, batch):
        loss = self.model(input_ids=batch, labels=batch).loss
        losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


task = Task()
loader = torch.utils.data.DataLoader(tokens, batch_size=2)
runner = lightning.Trainer(
    accelerator="cpu", max_steps=3, accumulate_grad_batches=4, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
runner.fit(task, loader)
"""
SETTINGS = (
    'target="ssd", directory="ssd", min_bytes=0, plan="offload-all", window_bytes=16384'
)
OFFLOAD = (
    ("import torch\n", "import ssdtrain\nimport torch\n"),
    (
        "tokens = torch",
        f"session = ssdtrain.offload(model, {SETTINGS})\ntokens = torch",
    ),
)
CALLBACK = (
    ("import torch\n", "import ssdtrain\nimport torch\n"),
    (
        "eval_dataset=data[:4],\n",
        "eval_dataset=data[:4],\n"
        f"    callbacks=[ssdtrain.OffloadCallback({SETTINGS})],\n",
    ),
)
SCRIPTS = {
    "trainer": (MODEL + TRAINER, CALLBACK),
    "trainer lora": (MODEL + LORA + TRAINER, CALLBACK),
    "trainer, offload": (MODEL + TRAINER, OFFLOAD),
    "accelerate": (MODEL + ACCELERATE, OFFLOAD),
    "lightning": (MODEL + LIGHTNING, OFFLOAD),
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "ssd").mkdir()
    monkeypatch.chdir(tmp_path)
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


def run(script: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(script, "script.py", "exec"), names)
    return names


@cache
def plain(script: str) -> tuple[dict[str, Any], int]:
    """What it does as it stands, and the highest peak of what it saved."""
    with SavedObserver() as observer:
        names = run(script)
        peak_bytes, _ = observer.take()
    return names, peak_bytes


def changed(script: str, edits: tuple[tuple[str, str], ...]) -> str:
    for before, after in edits:
        assert script.count(before) == 1, before
        script = script.replace(before, after)
    return script


def weights(names: dict[str, Any]) -> list[Tensor]:
    model: nn.Module = names["model"]
    return [p.detach().clone() for p in model.parameters()]


def needed(script: str) -> None:
    for package in ("accelerate", "peft", "lightning"):
        if f"{package}" in script:
            pytest.importorskip(package)


# peft and Lightning use names that transformers and PyTorch have deprecated.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.filterwarnings("ignore:.isinstance.treespec")
@pytest.mark.parametrize("which", SCRIPTS)
def test_two_lines(which: str, tmp_path: Path) -> None:
    stock, edits = SCRIPTS[which]
    needed(stock)
    ours = changed(stock, edits)
    difference = difflib.ndiff(stock.splitlines(), ours.splitlines())
    assert sum(line[0] in "+-" for line in difference) == 2
    theirs, their_peak = plain(stock)
    with written_before_backward():
        found = run(ours)
    assert found["losses"] == theirs["losses"]
    assert len(set(found["losses"])) > 2  # it does train
    for mine, other in zip(weights(found), weights(theirs), strict=True):
        assert torch.equal(mine, other)
    if "session" in found:
        reports = found["session"].steps
        found["session"].close()
    else:
        (callback,) = [
            c
            for c in found["trainer"].callback_handler.callbacks
            if type(c).__name__ == "OffloadCallback"
        ]
        assert callback.session is None
        reports = callback.reports
    assert len(reports) >= 3
    for report in reports:
        assert report.bytes_offloaded > 0.3 * report.bytes_saved
        assert report.bytes_written > 0
        assert report.saved_peak_bytes < 0.7 * their_peak
    assert not list((tmp_path / "ssd").iterdir())


@pytest.mark.slow
def test_zero_3_with_everything_offloaded(tmp_path: Path) -> None:
    """On two ranks. Nobody tells a callback about the engine: the module inside it is
    enough."""
    pytest.importorskip("deepspeed")
    worker = Path(__file__).with_name("trainer_ranks.py")
    run_ranks([worker, tmp_path / "out.json"], tmp_path)
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["with"] == found["without"]
    assert found["with"]["engine"] == "DeepSpeedEngine" and found["with"]["offloads"]
    assert len(set(found["with"]["losses"])) == 3
    assert len(found["reports"]) == 3
    for report in found["reports"]:
        assert report["bytes_offloaded"] > 0.5 * report["bytes_saved"]
        assert report["saved_peak_bytes"] < 0.3 * report["bytes_saved"]


@pytest.mark.slow
def test_accelerate_on_two_ranks(tmp_path: Path) -> None:
    """DDP with an unused layer, accumulation with a short last group, an uneven last
    batch, clipping, autocast, evaluation in between."""
    pytest.importorskip("accelerate")
    worker = Path(__file__).with_name("accelerate_ranks.py")
    run_ranks([worker, tmp_path / "out"], tmp_path, ACCELERATE_USE_CPU="1")
    for rank in range(2):
        found = json.loads((tmp_path / f"out.{rank}").read_text())
        for precision in ("no", "bf16"):
            assert found[precision]["equal"]
            reports = found[precision]["reports"]
            assert len(reports) == 9  # three epochs of three optimizer steps
            for report in reports:
                assert report["bytes_saved"] > 0
            assert any(r["bytes_offloaded"] + r["bytes_recomputed"] for r in reports)


MODULE = (
    ("import torch\n", "import ssdtrain\nimport torch\n"),
    ("loader = torch", f"session = ssdtrain.offload(task, {SETTINGS})\nloader = torch"),
)
HOOKED = (
    ("import torch\n", "import ssdtrain\nimport torch\n"),
    (
        "enable_model_summary=False,\n",
        "enable_model_summary=False,\n"
        f"    callbacks=[ssdtrain.LightningCallback({SETTINGS})],\n",
    ),
)


@pytest.mark.filterwarnings("ignore:.isinstance.treespec")
@pytest.mark.parametrize("edits", [MODULE, HOOKED], ids=["module", "callback"])
def test_lightning_modules_train_through_training_step(
    edits: tuple[tuple[str, str], ...],
) -> None:
    """Lightning never calls the module's forward: its training_step is wrapped."""
    pytest.importorskip("lightning")
    stock = MODEL + LIGHTNING
    theirs, found = plain(stock)[0], run(changed(stock, edits))
    assert found["losses"] == theirs["losses"]
    if "session" in found:
        reports = found["session"].steps
        found["session"].close()
    else:
        (callback,) = [c for c in found["runner"].callbacks if hasattr(c, "reports")]
        assert callback.session is None
        reports = callback.reports
    assert len(reports) == 3
    assert all(r.bytes_offloaded > 0.3 * r.bytes_saved for r in reports)
    assert not {"forward", "training_step"} & set(vars(found["task"]))


BY_HAND = """
import lightning
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
losses = []


def part(outputs):
    own = nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(64)
    return nn.Sequential(*own, nn.Linear(64, outputs))


class Task(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.maker, self.judges = part(16), nn.ModuleList([part(1), part(1)])
        self.automatic_optimization = False

    def judged(self, x):
        return sum(judge(x) for judge in self.judges)

    def training_step(self, batch):
        made = self.maker(batch)
        loss = F.softplus(self.judged(made.detach()) - self.judged(batch)).mean()
        self.stepped(1, loss)
        self.stepped(0, F.softplus(-self.judged(self.maker(batch))).mean())

    def stepped(self, number, loss):
        optimizer = self.optimizers()[number]
        self.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.untoggle_optimizer(optimizer)
        losses.append(loss.item())

    def validation_step(self, batch):
        losses.append(self.judged(self.maker(batch)).sum().item())

    def configure_optimizers(self):
        parts = self.maker, self.judges
        return [torch.optim.AdamW(p.parameters(), lr=1e-3) for p in parts]


task = Task()
loader = torch.utils.data.DataLoader(torch.randn(26, 16), batch_size=4)
runner = lightning.Trainer(
    accelerator="cpu", max_epochs=3, val_check_interval=2, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
runner.fit(task, loader, loader)
"""


@pytest.mark.filterwarnings("ignore:.isinstance.treespec")
@pytest.mark.parametrize("edits", [MODULE, HOOKED], ids=["module", "callback"])
def test_lightning_modules_that_optimize_by_hand(
    edits: tuple[tuple[str, str], ...],
) -> None:
    """Nobody calls their forward, and backward runs inside of training_step: what is
    called are their parts. Evaluation comes in between."""
    pytest.importorskip("lightning")
    edits = (("import lightning\n", "import lightning\nimport ssdtrain\n"), edits[1])
    theirs, found = plain(BY_HAND)[0], run(changed(BY_HAND, edits))
    assert found["losses"] == theirs["losses"]
    names = dict(found["task"].named_parameters())
    for name, other in theirs["task"].named_parameters():
        assert torch.equal(names[name], other)
    if "session" in found:
        reports = found["session"].steps
        found["session"].close()
    else:
        (callback,) = [c for c in found["runner"].callbacks if hasattr(c, "reports")]
        reports = callback.reports
    # Each optimizer's, though a graph of the first loss lives on behind its step.
    assert len(reports) == 42
    for report in reports:
        gone = report.bytes_offloaded + report.bytes_recomputed
        assert gone > 0.5 * report.bytes_saved


@pytest.mark.filterwarnings("ignore:.isinstance.treespec")
def test_a_trainer_in_which_nothing_moves_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    callback = "trainer.add_callback(__import__('ssdtrain').OffloadCallback())\n"
    run(MODEL + changed(TRAINER, (("trainer.train()", callback + "trainer.train()"),)))
    told = capsys.readouterr().out
    assert "Next: nothing is offloaded: " in told


def test_the_wrong_callback_names_the_right_one() -> None:
    pytest.importorskip("lightning")
    script = changed(
        MODEL + LIGHTNING,
        tuple((a, b.replace("Lightning", "Offload")) for a, b in HOOKED),
    )
    with pytest.raises(AttachError, match=r"ssdtrain\.LightningCallback"):
        run(script)


def test_a_second_train_attaches_anew_and_after_a_failure_too() -> None:
    from ssdtrain import OffloadCallback

    callback = OffloadCallback(max_overhead=0.01, target="host", min_bytes=0)
    model = nn.Linear(8, 8)
    before = dict(vars(model))
    callback.on_train_begin(None, None, None, model=model)
    callback.on_train_begin(None, None, None, model=model)  # the first one failed
    for _ in range(2):
        model(torch.randn(2, 8, requires_grad=True)).sum().backward()
        callback.on_step_end(None, None, None)
    assert len(callback.reports) == 2
    callback.on_train_end(None, None, None)
    assert vars(model) == before
    assert len(callback.reports) == 2


BEGIN = {
    "OffloadCallback": (
        lambda ours, training, model: ours.on_train_begin(
            None, training, None, model=model
        ),
        lambda ours, training: ours.on_step_begin(None, training, None),
    ),
    "LightningCallback": (
        lambda ours, training, model: ours.on_train_start(training, model),
        lambda ours, training: ours.on_train_batch_start(training, None, None, 0),
    ),
}
"""By callback: how a training begins, and a step of it."""


@pytest.mark.parametrize("is_shared", [True, False], ids=["callback", "model"])
@pytest.mark.parametrize("kind", BEGIN)
def test_a_training_within_another_that_shares(kind: str, is_shared: bool) -> None:
    """It takes over, as after a training that raised; if the first one goes on, it is
    told."""
    pytest.importorskip("lightning")
    begin, step = BEGIN[kind]
    model, within = nn.Linear(8, 8), nn.Linear(8, 8)
    outer, inner = (SimpleNamespace(global_step=0) for _ in range(2))
    first, second = (getattr(ssdtrain, kind)(plan="keep-all") for _ in range(2))
    begin(first, outer, model)
    step(first, outer)
    ours = first if is_shared else second
    begin(ours, inner, within if is_shared else model)
    step(ours, inner)
    with pytest.raises(AttachError, match="another training began with this"):
        step(first, outer)
    ours.close()
    assert "forward" not in {*vars(model), *vars(within)}


def test_bad_settings_fail_where_they_are_written() -> None:
    from ssdtrain import OffloadCallback

    with pytest.raises(ConfigError, match="unknown setting 'tarjet'"):
        OffloadCallback(tarjet="ssd")


def test_trainers_are_told_of_their_callback() -> None:
    """Who gives `offload` a trainer."""
    transformers = pytest.importorskip("transformers")
    lightning = pytest.importorskip("lightning")

    class OfOnesOwn(transformers.Trainer):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            pass

    with pytest.raises(AttachError, match="OffloadCallback"):
        ssdtrain.offload(OfOnesOwn(), max_overhead=0.01)
    with pytest.raises(AttachError, match="LightningCallback"):
        ssdtrain.offload(object.__new__(lightning.Trainer), max_overhead=0.01)
