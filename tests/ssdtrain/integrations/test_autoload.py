"""The autoload: what a .pth file starts, and how it fails."""

from pathlib import Path

import pytest

from tests.ssdtrain.integrations.scripts import (
    ALL,
    END,
    MODEL,
    assert_equal_bits,
    run,
    start,
)

TRAINER = (
    MODEL
    + """
from transformers import Trainer, TrainingArguments

def train(steps, **more):
    args = TrainingArguments(
        output_dir="out", max_steps=steps, per_device_train_batch_size=2,
        logging_steps=1, learning_rate=1e-2, report_to=[], disable_tqdm=True,
        use_cpu=True, dataloader_pin_memory=False, save_steps=6, save_only_model=False,
    )
    data = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=CALLBACKS)
    trainer.train(**more)
    return trainer
"""
)
FOUR = """
trainer = train(4)
losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
callbacks = trainer.callback_handler.callbacks
"""


def script(body: str, callbacks: str = "None") -> str:
    return TRAINER.replace("CALLBACKS", callbacks) + body


@pytest.mark.slow
def test_a_stock_script_is_offloaded(tmp_path: Path) -> None:
    text = script(FOUR) + END
    assert_equal_bits(run(text, tmp_path, ALL, is_fresh=True), run(text, tmp_path))


@pytest.fixture
def light(tmp_path: Path) -> Path:
    """A directory whose scripts import a `transformers` that takes no time to import;
    with the real one they are offloaded above."""
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").write_text("from transformers.trainer import Trainer\n")
    (package / "trainer.py").write_text("DEFAULT_CALLBACKS = []\nTrainer = object\n")
    return tmp_path


@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ("max_overhed=2%", "max_overhead"),
        ("plan=offload_all", "offload-all"),
        ("fitt", "fit"),
    ],
)
def test_a_slip_stops_before_a_model_is_built(
    slip: str, meant: str, light: Path
) -> None:
    body = "from transformers import Trainer\nopen('built', 'w').close()\n"
    done = start(body, light, slip, is_fresh=True)
    assert done.returncode != 0
    assert f"did you mean {meant!r}" in done.stderr
    assert not (light / "built").exists()
    start(body, light, "max_overhead=2%", is_fresh=True)
    assert (light / "built").exists()


def test_a_process_that_trains_nothing_meets_no_error(tmp_path: Path) -> None:
    """Nor does it import torch, or the settings."""
    body = """
import sys
assert not {"torch", "ssdtrain.config", "ssdtrain.switch"} & set(sys.modules)
assert "ssdtrain.integrations.autoload" in sys.modules
"""
    done = start(body, tmp_path, "misspelt", is_fresh=True)
    assert done.returncode == 0 and done.stderr == "", done.stderr


def test_unset_it_imports_nothing(tmp_path: Path) -> None:
    body = "import sys; assert not [m for m in sys.modules if 'ssdtrain' in m]"
    for setting in (None, ""):
        done = start(body, tmp_path, setting, is_fresh=True)
        assert done.returncode == 0 and done.stderr == "", done.stderr


@pytest.mark.slow
def test_a_callback_of_the_script_is_refused_beside_it(tmp_path: Path) -> None:
    own = "[__import__('ssdtrain').OffloadCallback(plan='keep-all')]"
    done = start(script("train(1)", own), tmp_path, ALL)
    assert done.returncode != 0
    assert "Where SSDTRAIN is set, a trainer opens one" in done.stderr


LOOP = """
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
"""


def test_a_loop_that_no_hook_reached_is_told_once(tmp_path: Path) -> None:
    done = start(LOOP, tmp_path, "fit")
    assert done.returncode == 0
    assert done.stderr.count("reached none of the trainers") == 1
    own = LOOP.replace(
        "optimizer =",
        "__import__('ssdtrain').offload(model, plan='keep-all')\noptimizer =",
    )
    assert "reached none" not in start(own, tmp_path, "fit").stderr


def test_without_cuda_it_trains_as_before_and_says_so(tmp_path: Path) -> None:
    """`fit` then means the memory of the machine, which a tiny model does not fill."""
    text = script(FOUR.replace("train(4)", "train(12)")) + END
    ours, plain = run(text, tmp_path, "fit,min_bytes=0"), run(text, tmp_path)
    assert ours["losses"] == plain["losses"] and ours["weights"] == plain["weights"]
    assert "the step is as without ssdtrain" in ours["printed"]
    lost = text.replace("model = Llama", "torch.cuda.set_device(0)\nmodel = Llama")
    done = start(lost, tmp_path, "fit")  # torch's own error, not one of ours
    assert done.returncode != 0 and "ssdtrain" not in done.stderr.splitlines()[-1]


def test_another_version_is_refused(light: Path) -> None:
    body = """
from importlib import metadata
real = metadata.version
metadata.version = lambda name: "9.1" if name == "transformers" else real(name)
"""
    text = body + "from transformers import Trainer\n"
    done = start(text, light, "fit", is_fresh=True)
    assert done.returncode != 0
    assert "transformers>=5.0,<6; 9.1 is installed" in done.stderr


# On a CPU plans need a goal and a few steps.
PLANNED = "memory_budget_bytes=300kB,min_bytes=0"


@pytest.mark.slow
def test_a_resumed_run_keeps_its_plan(tmp_path: Path) -> None:
    first = script("train(6)")
    done = start(first, tmp_path, PLANNED)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out/checkpoint-6/ssdtrain-plan-0.json").is_file()
    again = script(
        "trainer = train(8, resume_from_checkpoint='out/checkpoint-6')\n"
        "callbacks = trainer.callback_handler.callbacks\n"
        "(ours,) = [each for each in callbacks if hasattr(each, 'reports')]\n"
        "print('PEAKS', *[each.saved_peak_bytes for each in ours.reports])\n"
    )

    def first_peak(setting: str) -> int:
        done = start(again, tmp_path, setting)
        assert done.returncode == 0, done.stderr
        words = done.stdout.partition("PEAKS")[2].split()
        assert len(words) == 2
        return int(words[0])

    assert first_peak(PLANNED) <= 300_000
    # Made for another goal: it is not followed, and the first step is observed.
    assert first_peak("memory_budget_bytes=310kB,min_bytes=0") > 310_000
