"""What recipes save, what they cost, and whether training stays bitwise the same.

Part 1, GPT blocks in bf16 (forward, backward, SGD): no recipes, and recipes alone. The
two alternate on one model in one process, so that a drift of the clock frequency falls
on each; then a fresh pair of models runs the same steps for the bitwise law.
Part 2, models of transformers: bytes that recipes replace, by recipe and model, and
the bitwise law over four steps, alone and with everything offloaded.

    python -m recipes.bench.offload.recipes --budget-s 500
"""

import contextlib
import gc
import os
import statistics
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

import ssdtrain
from recipes.bench.common.blocks import Blocks
from recipes.bench.common.blocks import build as build_blocks
from recipes.bench.common.cells import Cells, arguments
from recipes.bench.models.transformers_models import LARGE, NAMES, SMALL, build, tokens
from recipes.bench.offload.placement import Clock, step
from ssdtrain.counters import StepReport

PRECISIONS = ("pure bf16", "bf16 autocast", "fp32")
SETTINGS: dict[str, Any] = {"target": "host", "recompute": "auto"}
ALONE = {**SETTINGS, "plan": "keep-all"}
OFFLOADING = {
    **SETTINGS,
    "plan": "offload-all",
    "min_bytes": 0,
    "window_bytes": 2**20,
}
SIZES = ("8192x4@16x1024", "12288x3@16x1024", "6144x24@8x2048", "16384x2@16x1024")
NUM_WARM_STEPS = 1
NUM_TIMED_STEPS = 3
NUM_LAW_STEPS = 4


@contextlib.contextmanager
def session(
    model: torch.nn.Module, settings: dict[str, Any] | None
) -> Iterator[ssdtrain.Session | None]:
    """A session, or nothing."""
    if settings is None:
        yield None
        return
    with ssdtrain.offload(model, **settings) as opened:
        yield opened


def digest(tensors: list[torch.Tensor]) -> list[int]:
    """A number for the bytes of each tensor that any single change would change."""
    numbers = []
    for tensor in tensors:
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        if data.numel() % 4:
            data = torch.nn.functional.pad(data, (0, 4 - data.numel() % 4))
        words = data.view(torch.int32)
        total = torch.zeros((), dtype=torch.int64, device=words.device)
        for start in range(0, words.numel(), 2**26):
            part = words[start : start + 2**26].long()
            end = start + part.numel()
            place = torch.arange(start, end, device=part.device)
            total += (part * (2 * place + 1)).sum()
        numbers.append(int(total))
    return numbers


def free() -> None:
    """Give memory back between cells."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def recipes_of(report: StepReport) -> dict[str, Any]:
    """The part of a report that speaks of recipes."""
    return {
        "bytes_saved": report.bytes_saved,
        "bytes_recomputed": report.bytes_recomputed,
        "share": report.bytes_recomputed / max(1, report.bytes_saved),
        "recompute_ms": report.recompute_ms,
        "recipes": report.recipes,
        "recipe_ms": report.recipe_ms,
        "fallbacks": report.fallbacks,
    }


def one_step(model: Blocks, x: torch.Tensor, clock: Clock) -> dict[str, Any]:
    """Forward, backward, SGD; the peak is above the level before the step."""
    cuda = x.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
    begin = clock.mark()
    loss = model(x)
    loss.backward()
    peak = torch.cuda.max_memory_allocated() - base if cuda else 0
    x.grad = None
    step(model)
    return {"marks": (begin, clock.mark()), "peak": peak, "loss": loss.detach()}


def alternate(size: str, device: torch.device, num_rounds: int) -> dict[str, Any]:
    """Step time and peak without recipes, and with them."""
    model, x = case(size, device)
    columns = {"keep": None, "recipes": ALONE}
    clock = Clock(device)
    times: dict[str, list[float]] = {name: [] for name in columns}
    peaks = dict.fromkeys(columns, 0)
    reports: dict[str, Any] = {}
    for _ in range(num_rounds):
        for name, settings in columns.items():
            with session(model, settings) as opened:
                for _ in range(NUM_WARM_STEPS):
                    one_step(model, x, clock)
                done = [one_step(model, x, clock) for _ in range(NUM_TIMED_STEPS)]
                times[name] += [clock.ms(*each["marks"]) for each in done]
                peaks[name] = max(peaks[name], *(each["peak"] for each in done))
                if opened is not None and opened.last_step is not None:
                    reports[name] = recipes_of(opened.last_step)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        name: {
            "step_ms": medians[name],
            "step_ratio": medians[name] / medians["keep"],
            "step_times_ms": times[name],
            "peak_gb": peaks[name] / 1e9,
            "peak_gone": 1 - peaks[name] / peaks["keep"] if peaks["keep"] else 0.0,
            **reports.get(name, {}),
        }
        for name in columns
    }


def case(size: str, device: torch.device) -> tuple[Blocks, torch.Tensor]:
    """A seeded model and its input, from HIDDENxLAYERS@BATCHxSEQUENCE."""
    (hidden, layers), (batch, sequence) = (
        map(int, part.split("x")) for part in size.split("@")
    )
    model = build_blocks(hidden, layers, device)
    torch.manual_seed(1)
    shape = (batch, sequence, hidden)
    x = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
    return model, x


def blocks_law(size: str, device: torch.device) -> dict[str, Any]:
    """Losses and bytes of the parameters after the same steps on fresh models."""
    outcomes = []
    for settings in (None, ALONE):
        model, x = case(size, device)
        with session(model, settings):
            steps = [one_step(model, x, Clock(device)) for _ in range(NUM_LAW_STEPS)]
        outcomes.append(
            ([each["loss"].item() for each in steps], digest(list(model.parameters())))
        )
        del model, x, steps
        free()
    return {"losses": outcomes[0][0], "bitwise_equal": outcomes[0] == outcomes[1]}


def train(
    name: str, precision: str, device: torch.device, settings: dict[str, Any] | None
) -> tuple[list[int], StepReport | None]:
    """Four steps of a transformers model; digests of all that must be equal."""
    shape = LARGE if device.type == "cuda" else SMALL
    model = build(name, shape).to(device)
    if precision == "pure bf16":
        model = model.to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    autocast = precision == "bf16 autocast"
    torch.manual_seed(1)
    numbers: list[int] = []
    report = None
    with session(model, settings) as opened:
        for _ in range(NUM_LAW_STEPS):
            ids = tokens(shape).to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            numbers += digest([loss, *gradients])
            del loss, gradients
            optimizer.step()
            optimizer.zero_grad()
        if opened is not None:
            report = opened.last_step
    return numbers + digest(list(model.parameters())), report


def model_cell(name: str, precision: str, device: torch.device) -> dict[str, Any]:
    """Bytes by recipe and the bitwise law, alone and with offloading."""
    # cuDNN's attention differs from itself from run to run, plain against plain.
    cudnn_attention = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    # Without warn_only: flash attention's backward is deterministic only so.
    torch.use_deterministic_algorithms(True)
    try:
        plain, _ = train(name, precision, device, None)
        again, _ = train(name, precision, device, None)
        free()
        alone, report = train(name, precision, device, {**ALONE, "min_bytes": 1})
        free()
        away, offloading = train(name, precision, device, OFFLOADING)
        free()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cuda.enable_cudnn_sdp(cudnn_attention)
    if report is None or offloading is None:
        raise RuntimeError("a session without a report")
    return {
        "plain_is_deterministic": plain == again,
        "bitwise_equal": plain == alone,
        "bitwise_equal_offloading": plain == away,
        "bytes_offloaded": offloading.bytes_offloaded,
        **recipes_of(report),
    }


def table(cells: Cells) -> None:
    """Print what was measured."""
    for name, cell in cells.data["cells"].items():
        if "error" in cell:
            print(f"{name:26} {cell['error'][:90]}")
        elif "keep" in cell:
            for column in ("keep", "recipes"):
                each = cell[column]
                print(
                    f"{name:18} {column:9} {each['step_ratio']:.4f}x "
                    f"{each['peak_gb']:6.2f} GB ({each['peak_gone']:.1%} gone) "
                    f"recipes {each.get('recompute_ms', 0):.2f} ms"
                )
        elif "share" in cell:
            parts = sorted(cell["recipes"].items(), key=lambda part: -part[1])
            total = cell["bytes_saved"]
            shares = ", ".join(f"{key} {size / total:.1%}" for key, size in parts)
            print(f"{name:26} {cell['share']:.1%} of saved bytes: {shares}")
            print(f"{'':26} equal: {cell['bitwise_equal']}, offloading: ", end="")
            print(cell["bitwise_equal_offloading"])
        else:
            print(f"{name:26} equal: {cell['bitwise_equal']}")


def main() -> None:
    """Run the cells that are missing."""
    parser = arguments(__doc__, 500, "offload/recipes")
    parser.add_argument(
        "--sizes",
        nargs="*",
        default=SIZES,
        help="HIDDENxLAYERS@BATCHxSEQUENCE",
    )
    parser.add_argument("--models", nargs="*", default=list(NAMES))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    cells = Cells(options.out, options.budget_s, {"rounds": options.rounds})
    for size in options.sizes:
        cells.run(size, lambda s=size: alternate(s, device, options.rounds))
        free()
        cells.run(f"{size} law", lambda s=size: blocks_law(s, device))
        free()
    for precision in PRECISIONS:
        for name in options.models:
            cells.run(
                f"{name}, {precision}",
                lambda n=name, p=precision: model_cell(n, p, device),
            )
            free()
    cells.save()
    table(cells)


if __name__ == "__main__":
    main()
