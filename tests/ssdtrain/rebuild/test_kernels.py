"""Faster kernels are offered, admitted, or counted: [Note: faster kernels]."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ssdtrain.counters import Fallback
from ssdtrain.rebuild import finder, kernels
from ssdtrain.rebuild.expression import Expression, Held, Layout
from ssdtrain.rebuild.kernels import Kernels, every_number, tabulate
from ssdtrain.rebuild.recipes import HALF
from tests.ssdtrain.rebuild.recipe_cases import CASES, WIDTH, Case, Result, run

SLOWER = Fallback.RECIPE_SLOWER.value
NUM_STEPS = 2
ALONE = {"plan": "keep-all", "min_bytes": 1}
TRITON_CASES = Path("tests/ssdtrain/rebuild/triton_cases.py")


def look_up(source: Tensor, table: Tensor) -> Tensor:
    """As the kernel does."""
    bits = source.view(torch.int16).int() & 0xFFFF
    return table[bits].view(source.dtype)


def wrong(source: Tensor, table: Tensor) -> Tensor:
    return look_up(source, table) + 1


def missing(source: Tensor, table: Tensor) -> Tensor:
    raise ImportError("no Triton")


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[Kernels]:
    """Faster kernels for small tensors on a CPU; the sessions' `Kernels`."""
    made: list[Kernels] = []

    def small_kernels() -> Kernels:
        made.append(Kernels(min_bytes=1, device_types=("cpu",)))
        return made[-1]

    monkeypatch.setattr(finder, "Kernels", small_kernels)
    monkeypatch.setattr(kernels, "look_up_bits", look_up)
    monkeypatch.setattr(kernels, "widen", torch.Tensor.float)
    return made


def result_of(case: Case) -> Result:
    """With recipes, after it was compared with the plain run."""
    result = run(case, num_steps=NUM_STEPS, **ALONE)
    assert result.equals(run(case, num_steps=NUM_STEPS))
    return result


def both(net: Any, a: Tensor) -> Tensor:
    """GELU in both 16-bit dtypes, each saved for a product."""
    x, y = F.gelu(a.half()), F.gelu(a.bfloat16())
    return (x * x).float() + (y * y).float()


TABLED = {
    "gelu": Case("GeluBackward0", CASES["gelu"].body, dtype=torch.float16),
    "tanh": Case("GeluBackward0", CASES["gelu tanh"].body, dtype=torch.float16),
    "both dtypes": Case("GeluBackward0", both),
}


@pytest.mark.parametrize("name", TABLED)
def test_tables_rebuild_the_same_bytes(name: str, on_cpu: list[Kernels]) -> None:
    case = TABLED[name]
    for report in result_of(case).reports:
        assert report.recipes[case.recipe] > 0
        assert SLOWER not in report.fallbacks
    assert on_cpu[0]._tables


def test_wrong_bytes_are_not_admitted(
    monkeypatch: pytest.MonkeyPatch, on_cpu: list[Kernels]
) -> None:
    monkeypatch.setattr(kernels, "look_up_bits", wrong)
    for report in result_of(TABLED["gelu"]).reports:
        assert report.recipes["GeluBackward0"] > 0
        assert report.fallbacks[SLOWER] == NUM_STEPS


def test_a_missing_kernel_is_counted_and_said_once(
    monkeypatch: pytest.MonkeyPatch,
    on_cpu: list[Kernels],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(kernels, "look_up_bits", missing)
    with caplog.at_level(logging.WARNING):
        reports = result_of(TABLED["gelu"]).reports
    assert [report.fallbacks[SLOWER] for report in reports] == [NUM_STEPS]
    said = [record.message for record in caplog.records]
    assert len([message for message in said if "no Triton" in message]) == 1
    assert len(said) == 2


def test_statistics_of_the_node_are_its_operands(
    monkeypatch: pytest.MonkeyPatch, on_cpu: list[Kernels]
) -> None:
    """Given mean and deviation, not computed from the input again."""
    seen: list[tuple[Tensor, ...]] = []

    def normalize(*operands: Tensor, fused: bool) -> Tensor:
        seen.append(operands)
        source, _, _, weight, bias = operands
        return F.layer_norm(source, (WIDTH,), weight, bias, 1e-3)

    monkeypatch.setattr(kernels, "normalize_saved", normalize)
    (report,) = run(CASES["layer norm"], **ALONE).reports
    assert SLOWER not in report.fallbacks
    source, mean, deviation, *_ = seen[-1]
    assert torch.allclose(mean, source.mean(1, keepdim=True), atol=1e-6)
    variance = source.var(1, keepdim=True, correction=0)
    assert torch.allclose(deviation, (variance + 1e-3).rsqrt())


def offered(
    function: Callable[..., Tensor], source: Tensor, **constants: Any
) -> tuple[Expression, ...]:
    held = Held(holder=None, layout=Layout.of(source))
    plain = Expression(
        recipe="any",
        function=function,
        operands=(held,),
        constants=tuple(sorted(constants.items())),
    )
    found = Kernels(min_bytes=1024, device_types=("cpu",)).offer(plain, source, None)
    assert found is not None
    return found.faster


@pytest.mark.parametrize(
    ("source", "number"),
    [
        (torch.zeros(32, 32).half(), 1),
        (torch.zeros(32, 32), 0),
        (torch.zeros(32, 32).half().t(), 0),
        (torch.zeros(32, 8).half(), 0),
    ],
    ids=["half", "single", "transposed", "small"],
)
def test_what_a_table_is_offered_for(source: Tensor, number: int) -> None:
    assert len(offered(F.gelu, source, approximate="none")) == number


def test_a_gpu_alone_has_faster_kernels() -> None:
    held = Held(holder=None, layout=Layout.of(torch.zeros(4).half()))
    plain = Expression(recipe="", function=F.gelu, operands=(held,), constants=())
    assert Kernels(min_bytes=0).offer(plain, torch.zeros(4).half(), None) is plain


@pytest.mark.parametrize("dtype", HALF)
def test_every_number_is_in_its_place(dtype: torch.dtype) -> None:
    numbers = every_number(dtype, torch.device("cpu"))
    bits = torch.randint(-(2**15), 2**15, (1000,)).to(torch.int16)
    place = bits.int() & 0xFFFF
    assert torch.equal(numbers.view(torch.int16)[place], bits)
    table = tabulate(torch.neg, dtype, torch.device("cpu"))
    assert torch.equal(table[place], (-bits.view(dtype)).view(torch.int16))


def test_triton_kernels() -> None:
    """In a process of its own: the interpreter is chosen when Triton is imported."""
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.getcwd()
    command = [sys.executable, "-W", "ignore", "-m", "pytest", "-q", str(TRITON_CASES)]
    command += ["-W", "ignore", "-p", "no:cacheprovider"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
