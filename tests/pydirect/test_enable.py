"""What importing changes in PyTorch (nothing), and what `enable` does, once."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ranks import LONGEST_S, run_ranks

ROOT = Path(__file__).resolve().parents[2]
STATE = """
import ctypes, sys, torch
from pydirect import accelerator

def state():
    image = accelerator._find_library()
    entries = accelerator._entries(image) if image else []
    return (
        torch._C._get_privateuse1_backend_name(),
        str(torch.device("privateuseone")),
        str(torch.accelerator.current_accelerator()),
        [ctypes.c_uint64.from_address(entry).value for entry in entries],
        hasattr(torch, "unified"),
        hasattr(torch.Tensor, "affinity"),
        id(torch.Tensor.share_memory_),
        id(torch.UntypedStorage.clone),
        id(torch.UntypedStorage._new_shared.__func__),
    )
"""


Run = Callable[[str], None]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs code in a process that has imported torch and has not enabled the device;
    warnings are errors."""

    def in_a_fork(code: str) -> None:
        script = tmp_path / "script.py"
        script.write_text(code)
        run_ranks([script], tmp_path, 1, PYTHONWARNINGS="error")

    return in_a_fork


def test_importing_changes_nothing_in_torch(run: Run) -> None:
    """Also everything that needs no device type."""
    code = STATE + (
        """
before = state()
import pydirect, pydirect.gather, pydirect.memory, pydirect.loader, pydirect.tiering
import pydirect.train, pydirect.sharing, pydirect.operators, pydirect.device
table = pydirect.memory.to_table(torch.arange(12.0).view(4, 3))
rows = pydirect.gather.index_select(table, torch.tensor([3, 0]))
assert torch.equal(rows, table[[3, 0]])
pydirect.explain(table, torch.tensor([3, 0]))
assert state() == before, (state(), before)
assert before[0] == "privateuseone"
"""
    )
    run(code)


def test_what_needs_the_device_says_so(run: Run) -> None:
    code = """
import torch, pydirect
for attempt in (
    lambda: pydirect.unify(torch.ones(2)),
    pydirect.counters,
):
    try:
        attempt()
    except pydirect.NotEnabledError as error:
        assert "pydirect.enable()" in str(error)
    else:
        raise SystemExit("no error")
"""
    run(code)


def test_enable_names_and_patches_once(run: Run) -> None:
    code = STATE + (
        """
import pydirect
before = state()
pydirect.enable()
first = state()
assert first[0] == "unified" and first[4] and first[5]
assert first[3] != before[3] or not before[3]
assert first[6] != before[6] and first[7] != before[7]
pydirect.enable()
assert state() == first
assert pydirect.unify(torch.ones(3)).is_unified
assert torch.ones(3).to("unified").sum().item() == 3
"""
    )
    run(code)


def test_a_taken_place_is_refused_and_left_alone(run: Run) -> None:
    code = """
import torch, pydirect
torch.utils.rename_privateuse1_backend("npu")
try:
    pydirect.enable()
except RuntimeError as error:
    assert "'npu' has taken" in str(error)
else:
    raise SystemExit("no error")
assert torch._C._get_privateuse1_backend_name() == "npu"
"""
    run(code)


def test_a_build_that_cannot_keep_cuda_is_refused_before_anything_changes(
    run: Run,
) -> None:
    code = STATE + (
        """
from unittest import mock
import pydirect
before = state()
with mock.patch.object(torch.version, "cuda", "13.0"):
    with mock.patch.object(accelerator, "_find_library", lambda: None):
        try:
            pydirect.enable()
        except RuntimeError as error:
            assert "cannot keep CUDA" in str(error)
        else:
            raise SystemExit("no error")
assert state() == before
"""
    )
    run(code)


def test_a_spawned_process_that_is_sent_a_unified_tensor_enables_the_device(
    tmp_path: Path,
) -> None:
    script = tmp_path / "spawn.py"
    script.write_text(
        """
import multiprocessing, sys
import torch, torch.multiprocessing as mp

def child(queue, answers):
    tensor = queue.get()
    answers.put((tensor.is_unified, tensor.affinity.value, tensor.cpu().tolist()))

if __name__ == "__main__":
    import pydirect
    pydirect.enable()
    context = mp.get_context("spawn")
    queue, answers = context.Queue(), context.Queue()
    process = context.Process(target=child, args=(queue, answers))
    process.start()
    sent = torch.arange(3.0).to("unified").set_affinity_("host").share_memory_()
    queue.put(sent)
    assert answers.get(timeout=240) == (True, "host", [0.0, 1.0, 2.0])
    process.join()
"""
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=LONGEST_S,
    )
    assert done.returncode == 0, done.stderr
