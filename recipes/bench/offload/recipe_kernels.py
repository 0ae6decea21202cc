"""The kernels that rebuild saved tensors against torch's own: bytes and time.

Each cell is one operator, dtype and shape: the time of a plain copy (the floor), of
torch's kernel, and of each candidate, and whether a candidate gave the same bytes.

    python -m recipes.bench.offload.recipe_kernels
"""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from recipes.bench.common.cells import Cells, arguments
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


def random(*shape: int, dtype: torch.dtype) -> Callable[[torch.device], Tensor]:
    """Normal numbers, made on the device."""
    return lambda device: 1.5 * torch.randn(shape, device=device, dtype=dtype)


def cases(
    rows: int, widths: tuple[int, ...]
) -> dict[str, Callable[[torch.device], Any]]:
    """The cells by name."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    tanh = partial(F.gelu, approximate="tanh")
    first = widths[0]
    found: dict[str, Callable[[torch.device], Any]] = {}

    def add(
        name: str,
        source: Callable[[torch.device], Tensor],
        cell: Callable[..., Any],
        *more: Any,
    ) -> None:
        found[name] = lambda device: cell(source(device), *more)

    for width in widths:
        add(
            f"layer norm bf16 {rows}x{width}",
            random(rows, width, dtype=bf16),
            norm,
            True,
        )
    for width in widths:
        name = f"gelu bf16 {rows}x{4 * width}"
        found[name] = lambda device, w=width: activation(
            F.gelu, random(rows, 4 * w, dtype=bf16)(device)
        )
    add(f"dropout mask bf16 {rows}x{first}", random(rows, first, dtype=bf16), mask)
    add(f"dropout mask fp32 {rows}x{first}", random(rows, first, dtype=fp32), mask)
    add(f"widen bf16 {rows}x{first}", random(rows, first, dtype=bf16), widening)
    add(f"widen fp16 {rows}x{first}", random(rows, first, dtype=fp16), widening)
    for dtype in (bf16, fp16):
        for name, function in (("gelu", F.gelu), ("tanh gelu", tanh), ("silu", F.silu)):
            found[f"{name} {dtype}, every number"] = every_pattern(function, dtype)
    add(
        f"silu bf16 {rows}x{first}",
        random(rows, first, dtype=bf16),
        lambda x: activation(F.silu, x),
    )
    add(
        f"layer norm, no bias, bf16 {rows}x{first}",
        random(rows, first, dtype=bf16),
        norm,
        False,
    )
    add(f"layer norm fp16 {rows}x{first}", random(rows, first, dtype=fp16), norm, True)
    add(f"layer norm fp32 {rows}x{first}", random(rows, first, dtype=fp32), norm, True)
    add("layer norm bf16 1001x777", random(1001, 777, dtype=bf16), norm, True)
    add(f"rms norm bf16 {rows}x{first}", random(rows, first, dtype=bf16), rms_norm)
    return found


def main() -> None:
    """Run the cells that are missing."""
    parser = arguments(__doc__, 25, "offload/recipe_kernels")
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--widths", type=int, nargs="*", default=(8192, 12288, 6144))
    options = parser.parse_args()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    cells = Cells(options.out, options.budget_s, {"rows": options.rows})
    for name, cell in cases(options.rows, tuple(options.widths)).items():
        cells.run(name, partial(cell, device))
    cells.save()
    for name, cell in cells.data["cells"].items():
        print(name, cell.get("error", "")[:200])
        for kind, row in cell.get("rows", {}).items():
            print(f"    {kind:14}", row)


if __name__ == "__main__":
    main()
