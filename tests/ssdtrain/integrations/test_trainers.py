"""Trainers whose wheels need more than a test environment has: Axolotl, torchtitan,
verl, LLaMA-Factory v1, ms-swift, NeMo AutoModel. Each script runs with the real package
if it is there (`make integrations`), else with a stand-in that keeps to the recorded
interface.
"""

import importlib.util
import os
from pathlib import Path

import pytest

from tests.ssdtrain.integrations.loop_scripts import LOOPS
from tests.ssdtrain.integrations.scripts import ALL, ONLY, assert_equal_bits, run, start
from tests.ssdtrain.integrations.trainer_scripts import SCRIPTS

Scripts = dict[str, tuple[str, str, bool]]
STANDINS = Path(__file__).with_name("standins")


def paths(trainer: str) -> str:
    """Where Python looks for the trainer."""
    inherited = os.environ.get("PYTHONPATH", "")
    if ONLY is not None:
        assert importlib.util.find_spec(trainer) is not None, f"install {trainer}"
    return os.pathsep.join(
        [
            str(STANDINS.parents[3]),
            inherited,
            *([str(STANDINS)] if ONLY is None else []),
        ]
    )


def trained_alike(name: str, scripts: Scripts, tmp_path: Path) -> None:
    """Compare the bits of a script of `scripts` with and without ssdtrain."""
    trainer = name.partition(" ")[0]
    if ONLY not in (None, trainer):
        pytest.skip(f"SSDTRAIN_INTEGRATION={ONLY}")
    plain, ours, setting = scripts[name]
    more = {"PYTHONPATH": paths(trainer)}
    assert_equal_bits(
        run(ours, tmp_path, ALL if setting else None, **more),
        run(plain, tmp_path, **more),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_equal_bits(name: str, tmp_path: Path) -> None:
    trained_alike(name, SCRIPTS, tmp_path)


@pytest.mark.skipif(ONLY is None, reason="make integrations")
@pytest.mark.parametrize("name", LOOPS)
def test_equal_bits_in_its_own_loop(name: str, tmp_path: Path) -> None:
    trained_alike(name, LOOPS, tmp_path)


def fails(
    script: str, directory: Path, trainer: str, setting: str | None = None
) -> str:
    """What a script that must stop says."""
    done = start(script, directory, setting, PYTHONPATH=paths(trainer))
    assert done.returncode != 0
    return done.stderr


@pytest.mark.skipif(ONLY is not None, reason="the stand-ins are enough")
def test_what_is_refused(tmp_path: Path) -> None:
    axolotl = SCRIPTS["axolotl"][1]
    own = axolotl.replace("cfg = {", "cfg = {'activation_offloading': True, ")
    assert "expects no activation_offloading, got True" in fails(
        own, tmp_path, "axolotl"
    )
    assert "unset SSDTRAIN" in fails(axolotl, tmp_path, "axolotl", "fit")
    slip = axolotl.replace('"min_bytes"', '"min_byte"')
    assert "did you mean 'min_bytes'" in fails(slip, tmp_path, "axolotl")
    titan = SCRIPTS["torchtitan"][1].replace(
        "root = Root",
        "from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as c\n"
        "model[1] = c.checkpoint_wrapper(model[1])\nroot = Root",
    )
    assert "expects no activation checkpointing, got it around '1'" in fails(
        titan, tmp_path, "torchtitan"
    )
    swift = SCRIPTS["swift"][1]
    assert "unset SSDTRAIN, got 'fit'" in fails(swift, tmp_path, "swift", "fit")
    nemo = SCRIPTS["nemo_automodel"][1]
    again = nemo.replace('"fsdp2"', '"fsdp2", "activation_checkpointing": "full"')
    assert "expects no distributed.activation_checkpointing, got 'full'" in fails(
        again, tmp_path, "nemo_automodel"
    )
    without = nemo.replace(", ssdtrain=SETTINGS", "")
    assert "expects a block 'ssdtrain'" in fails(without, tmp_path, "nemo_automodel")
    verl = SCRIPTS["verl"][1].replace('(model, "fsdp2"', '(model, "fsdp"')
    assert "expects verl's strategy fsdp2, got 'fsdp'" in fails(
        verl, tmp_path, "verl", "fit"
    )


@pytest.mark.skipif(ONLY is not None, reason="the stand-ins are enough")
def test_hooks_that_are_not_reached(tmp_path: Path) -> None:
    """A trainer that has changed is told, not passed over."""
    axolotl = SCRIPTS["axolotl"][1].replace("trainer.add_callback(callback)", "pass")
    assert "ssdtrain saw no step" in fails(axolotl, tmp_path, "axolotl")
    swift = SCRIPTS["swift"][1].replace('["ssdtrain"]', "[]")
    assert "add --callbacks ssdtrain" in fails(swift, tmp_path, "swift")
    nemo = SCRIPTS["nemo_automodel"][1].replace("self.model_parts = [model]", "pass")
    nemo = nemo.replace("ssdtrain=SETTINGS", "ssdtrain={'device_memory': 'fit'}")
    assert "expects model_parts after the recipe's setup, got None" in fails(
        nemo, tmp_path, "nemo_automodel"
    )
    other = "import sys, types\nfrom importlib import metadata\n"
    verl = other + (
        "import inspect\nreal = inspect.signature\n"
        "inspect.signature = lambda f: real(lambda model: 0) "
        "if f.__name__ == 'enable_activation_offloading' else real(f)\n"
    )
    assert "got arguments ['model']; unset SSDTRAIN" in fails(
        verl + "import verl.utils.activation_offload", tmp_path, "verl", "fit"
    )
    old = other + "metadata.version = lambda name: '0.1'\n"
    for trainer, module in {
        "verl": "verl.utils.activation_offload",
        "llamafactory": "llamafactory.v1.core.base_trainer",
    }.items():
        said = fails(f"{old}import {module}\n", tmp_path, trainer, "fit")
        assert "0.1 is installed" in said
    for trainer in ("swift", "nemo_automodel", "axolotl", "torchtitan"):
        said = fails(old + SCRIPTS[trainer][1], tmp_path, trainer)
        assert "0.1 is installed" in said
