"""Closed forms of kernels' times, and what calibration finds of the power."""

import json
import random

import pytest

from ssdtrain.tools.foresight import calls, design
from ssdtrain.tools.foresight.call import Call, KernelFamily
from ssdtrain.tools.foresight.device import DeviceCosts, from_json, load_device, to_json
from ssdtrain.tools.foresight.host import HostTable
from ssdtrain.tools.foresight.laws import fit_law, law_us
from ssdtrain.tools.foresight.spec import H100, H200


def made_up_us(call: Call) -> float:
    """Two microseconds, and bytes at 60 % of the data sheet's rate."""
    return 2.0 + call.num_bytes / (0.6 * H100.memory_gb_per_s * 1e3)


def cold(index: int) -> Call:
    """Of tensors that no cache holds."""
    noise = random.Random(index)
    rows = noise.randrange(20_000, 200_000)
    variant = noise.choice(["add", "copy", "mul"])
    return calls.memory(variant, rows=rows, columns=1024, dtype="fp32")


def test_a_law_finds_the_constants_of_a_made_up_device() -> None:
    noise = random.Random(3)
    drawn_calls = [cold(index) for index in range(160)]
    times = [(c, made_up_us(c) * noise.gauss(1.0, 0.02)) for c in drawn_calls]
    law = fit_law(KernelFamily.MEMORY, [(times, H100)])
    unseen = [cold(index) for index in range(200, 240)]
    found = law_us(law, unseen, H100)
    errors = [
        abs(us / made_up_us(call) - 1) for us, call in zip(found, unseen, strict=True)
    ]
    assert sum(errors) / len(errors) < 0.05
    # The same law on a device of faster memory: large calls gain in proportion.
    large = calls.memory("add", rows=200_000, columns=1000, dtype="fp32")
    [slow], [fast] = law_us(law, [large], H100), law_us(law, [large], H200)
    expected = H200.memory_gb_per_s / H100.memory_gb_per_s
    assert slow / fast == pytest.approx(expected, rel=0.05)


def test_a_device_with_laws_survives_json() -> None:
    shipped = load_device("h200")
    device = DeviceCosts(
        spec=H200,
        host=HostTable([]),
        laws={KernelFamily.ATTENTION: shipped.laws[KernelFamily.ATTENTION]},
        forests={KernelFamily.ATTENTION: shipped.forests[KernelFamily.ATTENTION]},
    )
    again = from_json(json.loads(json.dumps(to_json(device))))
    assert to_json(again) == to_json(device)
    call = design.draw(KernelFamily.ATTENTION, 3)
    assert again.kernel_us(call) == pytest.approx(shipped.kernel_us(call))
