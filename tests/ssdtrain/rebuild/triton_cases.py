"""The Triton kernel against the draws it repeats; run by test_dropout.py."""

import numpy as np
import pytest
import torch

from ssdtrain.rebuild import triton_kernels as kernels

CPU = torch.device("cpu")
NUM_THREADS = 512


def philox(counter: list[int], key: tuple[int, int]) -> list[int]:
    """Philox 4x32-10 (Salmon et al., 2011)."""
    a, b = key
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (second >> 32) ^ counter[1] ^ a,
            second & 0xFFFFFFFF,
            (first >> 32) ^ counter[3] ^ b,
            first & 0xFFFFFFFF,
        ]
        a, b = (a + 0x9E3779B9) & 0xFFFFFFFF, (b + 0xBB67AE85) & 0xFFFFFFFF
    return counter


@pytest.mark.parametrize(
    ("vector", "key", "rate"), [(4, 1, 0.1), (8, 1, 0.6), (8, 2**40 + 3, 0.1)]
)
def test_draw_mask(
    monkeypatch: pytest.MonkeyPatch, vector: int, key: int, rate: float
) -> None:
    """A thread takes a vector, then the next in the distance of all threads."""
    monkeypatch.setattr(kernels, "num_dropout_threads", lambda *_: NUM_THREADS)
    size, offset = 2 * NUM_THREADS * vector + 8 * vector, 40
    state = torch.tensor([key, offset]).view(torch.uint8)
    made = kernels.draw_dropped((size,), state, kernels.DropoutDraw(rate, vector), CPU)
    expected = []
    for start in range(0, size, 4):
        number, part = divmod(start, vector)
        round_, thread = divmod(number, NUM_THREADS)
        draw = offset // 4 + round_ * (vector // 4) + part // 4
        for bits in philox([draw, 0, thread, 0], (key & 0xFFFFFFFF, key >> 32)):
            uniform = np.float32(float(np.float32(bits)) * 2.0**-32 + 2.0**-33)
            expected.append(bool(uniform < np.float32(1 - rate)))
    assert made.tolist() == expected


@pytest.mark.parametrize("rate", [1e-9, 0.1, 1 / 3, 0.5, 0.999])
def test_first_dropped(rate: float) -> None:
    """Bits below it make numbers below 1 - rate in float32, as curand's do."""
    first = kernels.first_dropped(rate)
    near = first + np.arange(-600, 600)
    bits = near[(near >= 0) & (near < 2**32)]
    uniform = bits.astype(np.float32).astype(np.float64) * 2.0**-32 + 2.0**-33
    kept = uniform.astype(np.float32) < np.float32(1 - rate)
    assert np.array_equal(kept, bits < first)
