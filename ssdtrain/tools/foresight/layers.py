"""What one transformer layer costs on a device, by its sizes alone: pre-norm, fused
attention, a GELU MLP, two dropouts, 16-bit data, tensor parallelism."""

from typing import NamedTuple

from ssdtrain.tools.foresight import calls
from ssdtrain.tools.foresight.call import Call
from ssdtrain.tools.foresight.device import Device

DTYPE = "bf16"


class LayerTimes(NamedTuple):
    """Seconds of one layer and one micro-batch on one GPU, without communication."""

    forward: float
    backward: float

    @property
    def step_per_forward(self) -> float:
        """Forward and backward over forward."""
        return (self.forward + self.backward) / self.forward


def layer_times(
    device: Device,
    *,
    micro_batch: int,
    sequence: int,
    hidden: int,
    heads: int,
    tensor: int = 1,
) -> LayerTimes:
    """Price a layer by the device's kernel models."""
    tokens = micro_batch * sequence
    inner = max(1, hidden // tensor)
    own_heads = max(1, heads // tensor)

    def attention(backward: bool) -> Call:
        return calls.attention(
            backward=backward,
            batch=micro_batch,
            heads=own_heads,
            kv_heads=own_heads,
            queries=sequence,
            keys=sequence,
            head_dim=max(1, hidden // heads),
            causal=True,
        )

    def outside(way: str) -> list[Call]:
        """What is no product, forward or `_backward`."""
        norm = calls.norm(f"layer_norm{way}", rows=tokens, columns=hidden, dtype=DTYPE)
        wide = [_wide(f"dropout{way}", tokens, hidden), _wide("add", tokens, hidden)]
        gelu = _wide(f"gelu{way}", tokens, 4 * inner)
        return [attention(way != ""), gelu, *wide, *wide, norm, norm]

    forward, backward = outside(""), outside("_backward")
    widths = [(3 * inner, hidden), (hidden, inner), (4 * inner, hidden)]
    for out, width in (*widths, (hidden, 4 * inner)):
        forward.append(
            calls.product(m=tokens, n=out, k=width, dtype=DTYPE, layout="nt", bias=True)
        )
        backward += [
            calls.product(m=tokens, n=width, k=out, dtype=DTYPE, layout="nn"),
            calls.product(m=out, n=width, k=tokens, dtype=DTYPE, layout="tn"),
            calls.memory("sum_rows", rows=tokens, columns=out, dtype=DTYPE),
        ]
    return LayerTimes(_seconds(device, forward), _seconds(device, backward))


def _wide(variant: str, rows: int, columns: int) -> Call:
    return calls.memory(variant, rows=rows, columns=columns, dtype=DTYPE)


def _seconds(device: Device, kernels: list[Call]) -> float:
    return sum(device.kernel_us(call) for call in kernels) * 1e-6
