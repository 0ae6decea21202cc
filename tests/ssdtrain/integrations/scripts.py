"""Scripts that know nothing of ssdtrain, and how they are run. Not a test file."""

import hashlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from ssdtrain.switch import VARIABLE
from tests.ssdtrain.integrations.forked import run_forked

ONLY = os.environ.get("SSDTRAIN_INTEGRATION")
"""One trainer, whose real package must be there."""

ROOT = Path(__file__).resolve().parents[3]
ALL = "plan=offload-all,min_bytes=0,target=host,window_bytes=16384"
"""A goal that every tensor meets."""
AUTOLOAD = ROOT / "ssdtrain" / "integrations" / "ssdtrain_autoload.pth"
# What site does with the .pth file; the checkout is installed without it.
START = AUTOLOAD.read_text()
SETTINGS = """
SETTINGS = {
    "plan": "offload-all", "min_bytes": 0, "target": "host", "window_bytes": 16384
}
"""
"""The same in Python."""
MODEL = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
torch.use_deterministic_algorithms(True)
config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, use_cache=False,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)
model = LlamaForCausalLM(config)
tokens = torch.randint(3, 64, (32, 48))
"""


def digest_of(model: Any) -> str:
    """Of all weights, as bytes."""
    found = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        found.update(name.encode() + whole.detach().cpu().float().numpy().tobytes())
    return found.hexdigest()


END = f"""
import hashlib
import json
from typing import Any

{inspect.getsource(digest_of)}
"""
END += """
def reports_of(callbacks):
    return [
        [each.bytes_offloaded, each.bytes_recomputed, each.bytes_saved]
        for callback in callbacks if hasattr(callback, "reports")
        for each in callback.reports
    ]

FOUND = {
    "losses": losses, "weights": digest_of(model), "reports": reports_of(callbacks),
}
with open("out.json", "w") as file:
    json.dump(FOUND, file)
"""


def run(
    script: str, directory: Path, setting: str | None = None, **more: Any
) -> dict[str, Any]:
    """What the script leaves in out.json, with SSDTRAIN set or not; `more` as for
    `start`."""
    done = start(script, directory, setting, **more)
    assert done.returncode == 0, done.stderr[-6000:] + done.stdout[-2000:]
    found = json.loads((directory / "out.json").read_text())
    return {**found, "printed": done.stdout + done.stderr}


def start(
    script: str,
    directory: Path,
    setting: str | None = None,
    *,
    is_fresh: bool = ONLY is not None,
    **more: str,
) -> "subprocess.CompletedProcess[str]":
    """The script in a process that Python started with the autoload.

    Args:
        is_fresh: it imports the trainer itself; else a fork of a process that has.
        more: environment variables.
    """
    directory.mkdir(exist_ok=True)
    path = directory / "script.py"
    path.write_text(START + script)
    environment = {k: v for k, v in os.environ.items() if k != VARIABLE}
    inherited = os.environ.get("PYTHONPATH", "")
    environment.update(
        PYTHONPATH=os.pathsep.join([str(ROOT), inherited]).rstrip(os.pathsep),
        OMP_NUM_THREADS="1",
        HF_HUB_OFFLINE="1",
        CUDA_VISIBLE_DEVICES="",
        DS_ACCELERATOR="cpu",
    )
    environment.update(more)
    if setting is not None:
        environment[VARIABLE] = setting
    if is_fresh:
        return subprocess.run(
            [sys.executable, "script.py"],
            cwd=directory,
            env=environment,
            capture_output=True,
            text=True,
            timeout=280,
        )
    status = run_forked(path, environment)
    printed = [(directory / name).read_text() for name in ("out.txt", "err.txt")]
    return subprocess.CompletedProcess([str(path)], status, *printed)


def assert_equal_bits(ours: dict[str, Any], plain: dict[str, Any]) -> None:
    """Four steps that train, with the same losses and weights; every step of ours
    moved or rebuilt most of what was saved, and a plain one had no callback."""
    assert plain["reports"] == []
    assert ours["losses"] == plain["losses"] and len(ours["losses"]) == 4
    assert len(set(ours["losses"])) > 1
    assert ours["weights"] == plain["weights"]
    assert len(ours["reports"]) == 4
    for offloaded, rebuilt, saved in ours["reports"]:
        assert offloaded > 0 and offloaded + rebuilt > 0.5 * saved
