"""The kernels that rebuild saved tensors against torch's own: bytes and time.

Each cell is one operator, dtype and shape: the time of a plain copy (the floor), of
torch's kernel, and of each candidate, and whether a candidate gave the same bytes.

    python -m recipes.bench offload.recipe_kernels
"""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from recipes.bench.harness.cli import Bench
from ssdtrain.rebuild import kernels, triton_kernels
from ssdtrain.rebuild.admission import same_bytes

NUM_ROUNDS, NUM_CALLS = 5, 5
ROWS = 16384
RATE = 0.1
Make = Callable[[], Tensor]


def milliseconds(make: Make) -> float:
    """Median device time of one call."""
    make()
    times = []
    for _ in range(NUM_ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(NUM_CALLS):
            make()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / NUM_CALLS)
    return statistics.median(times)


def against(plain: Make, candidates: dict[str, Make], source: Tensor) -> dict[str, Any]:
    """Time and equality of candidates; an error is a result."""
    cuda = source.device.type == "cuda"
    real = plain()
    size = real.nbytes
    rows: dict[str, Any] = {}
    for name, make in {"copy": source.clone, "torch": plain, **candidates}.items():
        try:
            made = make()
            equal = name == "copy" or same_bytes(made, real)
            differ = 0 if equal else int((made != real).sum())
            del made
            ms = milliseconds(make) if cuda else 0.0
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            rows[name] = {"error": repr(error)[:300]}
            continue
        rows[name] = {"equal": equal, "differ": differ, "ms": ms}
        rows[name]["ms_per_gb"] = ms / size * 1e9
    return {"bytes": size, "rows": rows}


def activation(function: Callable[..., Tensor], source: Tensor) -> dict[str, Any]:
    """An elementwise function of 16-bit numbers."""
    entries = kernels.tabulate(function, source.dtype, source.device)
    return against(
        lambda: function(source),
        {"table": lambda: triton_kernels.look_up(source, entries)},
        source,
    )


def every_pattern(
    function: Callable[..., Tensor], dtype: torch.dtype
) -> Callable[[torch.device], dict[str, Any]]:
    """All 65,536 numbers, with a tail, from an address that is no multiple of 16."""

    def cell(device: torch.device) -> dict[str, Any]:
        numbers = kernels.every_number(dtype, device).repeat(3)
        return activation(function, numbers[1:-2])

    return cell


def norm(source: Tensor, has_bias: bool) -> dict[str, Any]:
    """Layer norm with the statistics of torch's own forward."""
    width = source.shape[-1:]
    weight, bias = (torch.randn_like(source[0]) for _ in range(2))
    shift = bias if has_bias else None
    _, mean, deviation = torch.native_layer_norm(source, width, weight, shift, 1e-5)

    statistics = triton_kernels.Statistics(mean, deviation)

    def candidate(fused: bool) -> Make:
        return lambda: triton_kernels.normalize_rows(
            source, statistics, weight, shift, fused=fused
        )

    return against(
        lambda: F.layer_norm(source, width, weight, shift, 1e-5),
        {"fused": candidate(True), "unfused": candidate(False)},
        source,
    )


def rms_norm(source: Tensor) -> dict[str, Any]:
    """RMS norm, where torch has a fused one."""
    width = source.shape[-1:]
    weight = torch.randn_like(source[0])
    _, deviation = torch._fused_rms_norm(source, width, weight, 1e-5)
    return against(
        lambda: F.rms_norm(source, width, weight, 1e-5),
        {
            "fused": lambda: triton_kernels.normalize_rows(
                source,
                triton_kernels.Statistics(None, deviation),
                weight,
                None,
                fused=False,
            )
        },
        source,
    )


def widening(source: Tensor) -> dict[str, Any]:
    """16 bits to float32."""
    return against(
        source.float, {"widen": lambda: triton_kernels.widen_halves(source)}, source
    )


def mask(source: Tensor) -> dict[str, Any]:
    """The mask of a dropout."""
    if source.device.type != "cuda":
        return {"rows": {}}
    # A small seed, as models use: it fits into 32 bits.
    torch.cuda.manual_seed(1)
    state = torch.cuda.get_rng_state(source.device)

    def plain() -> Tensor:
        torch.cuda.set_rng_state(state, source.device)
        return torch.native_dropout(torch.empty_like(source), RATE, True)[1]

    def drawn(vector: int) -> Tensor:
        return triton_kernels.draw_mask(
            tuple(source.shape),
            state,
            triton_kernels.Drop(RATE, vector),
            source.device,
        )

    return against(
        plain, {f"vectors of {n}": partial(drawn, n) for n in (4, 8)}, source
    )


def cases(
    rows: int, widths: tuple[int, ...]
) -> dict[str, Callable[[torch.device], Any]]:
    """The cells by name."""
    first, names = widths[0], {"bf16": torch.bfloat16, "fp16": torch.float16}
    names["fp32"] = torch.float32
    found: dict[str, Callable[[torch.device], Any]] = {}

    def add(
        name: str, cell: Callable[..., Any], dtype: str, *more: Any, wide: int = first
    ) -> None:
        long = 1001 if wide == 777 else rows

        def run(device: torch.device) -> Any:
            shape = (long, wide)
            source = 1.5 * torch.randn(shape, device=device, dtype=names[dtype])
            return cell(source, *more)

        found[f"{name} {dtype} {long}x{wide}"] = run

    gelu, silu = (partial(_of, function) for function in (F.gelu, F.silu))
    for width in widths:
        add("layer norm", norm, "bf16", True, wide=width)
    for width in widths:
        add("gelu", gelu, "bf16", wide=4 * width)
    for dtype in ("bf16", "fp32"):
        add("dropout mask", mask, dtype)
    for dtype in ("bf16", "fp16"):
        add("widen", widening, dtype)
    tanh = partial(F.gelu, approximate="tanh")
    for kind in (torch.bfloat16, torch.float16):
        for name, function in (("gelu", F.gelu), ("tanh gelu", tanh), ("silu", F.silu)):
            found[f"{name} {kind}, every number"] = every_pattern(function, kind)
    add("silu", silu, "bf16")
    add("layer norm, no bias,", norm, "bf16", False)
    for dtype in ("fp16", "fp32"):
        add("layer norm", norm, dtype, True)
    add("layer norm", norm, "bf16", True, wide=777)
    add("rms norm", rms_norm, "bf16")
    return found


def _of(function: Callable[..., Tensor], source: Tensor) -> dict[str, Any]:
    return activation(function, source)


def main(
    bench: Bench, *, rows: int = ROWS, widths: tuple[int, ...] = (8192, 12288, 6144)
) -> None:
    """Run the cells that are missing."""
    device = bench.device
    cells = bench.cells({"rows": rows})
    for name, cell in cases(rows, tuple(widths)).items():
        cells.run(name, cell, device)
    for name, cell in cells.data["cells"].items():
        print(name, cell.get("error", "")[:200])
        for kind, row in cell.get("rows", {}).items():
            print(f"    {kind:14}", row)
