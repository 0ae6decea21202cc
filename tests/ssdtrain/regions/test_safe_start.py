"""What fits under checkpointing fits under us: an allocator that refuses more."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ssdtrain
from ssdtrain.cache import regions as in_cache
from ssdtrain.observe import links
from ssdtrain.transfer.device import CpuDevice
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.cache.metered import Meter

WIDTH, HEADS, NUM_LAYERS, NUM_STEPS = 64, 2, 4, 4
RESERVE = 1.03
SETTINGS: dict[str, Any] = {"max_overhead": 0.01, "target": "host", "min_bytes": 0}


class Limited(Meter):
    """Its device has so many bytes, and no more."""

    limit_bytes: int | None = None

    def add(self, tensor: Tensor) -> None:
        """Count a tensor's storage.

        Raises:
            OutOfMemoryError: it does not fit.
        """
        super().add(tensor)
        if self.limit_bytes is not None and self.is_above(self.limit_bytes):
            over = self.now_bytes - self.limit_bytes
            raise torch.OutOfMemoryError(f"{over} bytes too many")


class Gpt(nn.Module):
    """Layer norms, attention, GELU, dropouts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.out(self.attention(self.norm1(x))))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))

    def attention(self, x: Tensor) -> Tensor:
        """(LENGTH, WIDTH) to the same."""
        length = x.shape[0]
        q, k, v = self.qkv(x).view(length, 3, HEADS, -1).permute(1, 2, 0, 3)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(0, 1).reshape(length, WIDTH)


class Llama(Gpt):
    """A gated MLP, and no dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4 * WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self.attention(self.norm1(x)))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Holding(Gpt):
    """Its locals hold what they name until it returns."""

    def forward(self, x: Tensor) -> Tensor:
        norm1 = self.norm1(x)
        attended = self.attention(norm1)
        middle = x + self.out(attended)
        norm2 = self.norm2(middle)
        up = self.up(norm2)
        gelu = F.gelu(up)
        return middle + self.down(gelu)


class Lora(Llama):
    """Frozen weights, and adapters of the attention's."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.a = nn.Linear(WIDTH, 4, bias=False)
        self.b = nn.Linear(4, WIDTH, bias=False)

    def attention(self, x: Tensor) -> Tensor:
        """(LENGTH, WIDTH) to the same."""
        result: Tensor = super().attention(x) + self.b(self.a(x))
        return result


SELF_CHECK_BYTES = 1 << 18
"""The factors of the self-check's digests: as large on every device."""
LENGTH = 512


class Net(nn.Module):
    """Layers behind an embedding, and the layers' way to run."""

    def __init__(self, kind: type[Gpt], run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(kind() for _ in range(NUM_LAYERS))
        self._run = run

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = self._run(layer, x)
        return x.square().mean()


def plainly(layer: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = layer(x)
    return result


def checkpointed(layer: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = checkpoint(layer, x, use_reentrant=False)
    return result


def train(
    meter: Limited, kind: type[Gpt], length: int, num_steps: int, *, ours: bool
) -> tuple[int, list[Tensor]]:
    """The highest peak, everything counted, and the weights at the end."""
    highest: list[int] = []
    reset = meter.reset_peak
    meter.reset_peak = lambda: (highest.append(meter.peak_bytes), reset())[0]  # type: ignore[method-assign, func-returns-value]
    with meter:
        torch.manual_seed(0)
        model = Net(kind, plainly if ours else checkpointed)
        trained = [each for each in model.parameters() if each.requires_grad]
        optimizer = torch.optim.Adam(trained, lr=1e-3, foreach=False)
        session = ssdtrain.offload(model, **SETTINGS) if ours else None
        try:
            x = torch.randn(length, WIDTH)
            for _ in range(num_steps):
                model(x).backward()
                optimizer.step()
                optimizer.zero_grad()
        finally:
            meter.reset_peak = reset  # type: ignore[method-assign]
            if session is not None:
                session.close()
    found = [each.detach().clone() for each in model.parameters()]
    return max([*highest, meter.peak_bytes]), found


# `Lora` is a `Llama`. Other lengths were run as well.
@pytest.mark.parametrize(
    ("kind", "num_steps"), [(Gpt, NUM_STEPS), (Holding, NUM_STEPS), (Lora, 8)]
)
def test_it_fits_wherever_checkpointing_does(
    kind: type[Gpt], num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warm-up, the observed step, two that are timed and, for one, steps under the
    plan: at checkpointing's own peak and 3 %."""
    monkeypatch.setattr(in_cache, "modes_stand", lambda: False)
    peak_bytes, theirs = train(Limited(), kind, LENGTH, num_steps, ours=False)
    meter = Limited()
    meter.limit_bytes = limit = int(RESERVE * peak_bytes) + SELF_CHECK_BYTES
    meter.install(monkeypatch)
    monkeypatch.setattr(CpuDevice, "capacity_bytes", lambda device: limit)
    # Between two steps; on a device these 16 MB are small beside all else.
    monkeypatch.setattr(links, "PROBE_BYTES", 4096)
    _, ours = train(meter, kind, LENGTH, num_steps, ours=True)
    assert same_bits(ours, theirs)
