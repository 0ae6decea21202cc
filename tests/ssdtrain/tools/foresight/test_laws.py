"""Closed forms of kernels' times, and what calibration finds of the power."""

import json
import random

import pytest

from ssdtrain.tools.foresight import calls, design
from ssdtrain.tools.foresight.calibrate import drawn
from ssdtrain.tools.foresight.call import Call, Family
from ssdtrain.tools.foresight.device import Device, from_json, load_device, to_json
from ssdtrain.tools.foresight.host import HostTable
from ssdtrain.tools.foresight.laws import fit_law, law_us
from ssdtrain.tools.foresight.power import Power
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
    law = fit_law(Family.MEMORY, [(times, H100)])
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


def test_products_follow_their_sums_and_split_them() -> None:
    device = load_device("h100")
    law = device.laws[Family.PRODUCT]

    def us(**sizes: int) -> float:
        [found] = law_us(law, [calls.product(dtype="bf16", **sizes)], H100)
        return found

    # Twice the sum takes twice as long where the device is full.
    full = us(m=8192, n=8192, k=8192)
    assert us(m=8192, n=8192, k=16384) == pytest.approx(2 * full, rel=0.1)
    # Few tiles of long sums are shared among the multiprocessors.
    few = us(m=128, n=128, k=65536)
    assert few < 0.3 * 2 * us(m=128 * 11, n=128 * 12, k=65536)
    assert us(m=4095, n=4095, k=4095) > 1.1 * us(m=4096, n=4096, k=4096)


def test_a_device_with_laws_survives_json() -> None:
    shipped = load_device("h200")
    device = Device(
        spec=H200,
        host=HostTable([]),
        laws={Family.ATTENTION: shipped.laws[Family.ATTENTION]},
        forests={Family.ATTENTION: shipped.forests[Family.ATTENTION]},
    )
    again = from_json(json.loads(json.dumps(to_json(device))))
    assert to_json(again) == to_json(device)
    call = design.draw(Family.ATTENTION, 3)
    assert again.kernel_us(call) == pytest.approx(shipped.kernel_us(call))


def test_power_is_found_from_the_clock_that_a_long_product_keeps() -> None:
    power = Power(
        limit_watts=650, idle_watts=130, joules_per_tflop=1.3, joules_per_gb=0.13
    )
    size, clock = 8192, 0.8
    call = calls.product(m=size, n=size, k=size, dtype="bf16")
    # At the limit: idle + energy * clock ** 2 / time.
    steady = power.joules(call) * clock**2 / (power.limit_watts - power.idle_watts)
    run = {"size": size, "steady_us": steady * 1e6}
    seen = {"sm_mhz": 1600.0, "max_sm_mhz": 2000.0}
    other = Power(
        limit_watts=650, idle_watts=130, joules_per_tflop=0.5, joules_per_gb=0.13
    )
    found = drawn(other, run, seen)
    assert found.joules_per_tflop == pytest.approx(1.3, rel=1e-6)
    assert drawn(other, run, {}) == other
    assert drawn(other, run, {"sm_mhz": 2000.0, "max_sm_mhz": 2000.0}) == other


def by_law(device: str, call: Call) -> float:
    found = load_device(device)
    [us] = law_us(found.laws[call.family], [call], found.spec)
    return us


@pytest.mark.parametrize("device", ["h100", "h200"])
def test_ways_that_libraries_choose_by_size(device: str) -> None:
    def norm(rows: int) -> float:
        return by_law(
            device,
            calls.norm("layer_norm_backward", rows=rows, columns=64, dtype="bf16"),
        )

    # One more row, and the sums over rows are shared among blocks.
    assert norm(65_536) > 1.5 * norm(65_537)

    def gradient(rows: int) -> float:
        sizes = dict(columns=64, table_rows=4096, distinct_rows=rows // 2)
        return by_law(
            device, calls.lookup("lookup_backward", rows=rows, dtype="fp32", **sizes)
        )

    # Row by row, then sorted: that hardly depends on how many there are.
    assert gradient(3000) > 1.7 * gradient(1500)
    assert gradient(12_000) < 1.5 * gradient(4000)

    def update(tensors: int) -> float:
        sizes = dict(elements=1_280_000, tensors=tensors)
        return by_law(device, calls.optimizer("sgd", dtype="bf16", **sizes))

    # Tensors of 4,000 elements in five launches; of 64,000 in one, a block's time.
    assert update(320) > 1.7 * update(64)
    assert update(20) > 2.0 * update(64)


def test_what_was_touched_before_is_warm_as_far_as_the_cache_holds_it() -> None:
    def us(rows: int, warm: bool) -> float:
        sizes = dict(rows=rows, columns=1024, dtype="fp32")
        return by_law("h200", calls.memory("add", warm=warm, **sizes))

    assert us(200_000, warm=True) == pytest.approx(us(200_000, warm=False), rel=0.01)
    assert us(1000, warm=True) < us(1000, warm=False)
