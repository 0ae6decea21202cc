"""What recipes save, what they cost, and whether training stays bitwise the same.

Part 1, GPT blocks in bf16 (forward, backward, SGD): no recipes, and recipes
alone. The two alternate on one model in
one process, so that a drift of the clock frequency falls on each; then a fresh pair of
models runs the same steps for the bitwise law.
Part 2, models of transformers: bytes that recipes replace, by recipe and model, and
the bitwise law over four steps, alone and with everything offloaded.

    python -m recipes.bench offload.recipes --budget-s 500
"""

import os
import statistics
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

from recipes.bench.harness.blocks import Size, Steps, session_of
from recipes.bench.harness.cli import Bench
from recipes.bench.models.stock import Stock
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
NAMES = ("gpt2", "bert", "t5", "llama")
SMALL = (256, 2, 4, 512, 4, 64)
LARGE = (1024, 4, 16, 32000, 8, 512)
"""Width, layers, heads, words, batch and sequence of these models."""
NUM_WARM_STEPS = 1
NUM_TIMED_STEPS = 3
NUM_LAW_STEPS = 4


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


def alternate(size: str, device: torch.device, num_rounds: int) -> dict[str, Any]:
    """Step time and peak without recipes, and with them."""
    steps = case(size, device)
    columns = {"keep": None, "recipes": ALONE}
    times: dict[str, list[float]] = {name: [] for name in columns}
    peaks = dict.fromkeys(columns, 0)
    reports: dict[str, Any] = {}
    for _ in range(num_rounds):
        for name, settings in columns.items():
            with session_of(steps.model, settings) as opened:
                for _ in range(NUM_WARM_STEPS):
                    steps.step()
                done = [steps.step() for _ in range(NUM_TIMED_STEPS)]
                times[name] += map(steps.ms, done)
                peaks[name] = max(peaks[name], *(each.peak_bytes for each in done))
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


def case(size: str, device: torch.device) -> Steps:
    """A seeded model and its input, from HIDDENxLAYERS@BATCHxSEQUENCE."""
    parts = [int(each) for part in size.split("@") for each in part.split("x")]
    return Steps(Size(*parts), device)


def blocks_law(size: str, device: torch.device) -> dict[str, Any]:
    """Losses and bytes of the parameters after the same steps on fresh models."""
    outcomes = []
    for settings in (None, ALONE):
        steps = case(size, device)
        with session_of(steps.model, settings):
            done = [steps.step() for _ in range(NUM_LAW_STEPS)]
        losses = [each.loss.item() for each in done]
        outcomes.append((losses, digest(list(steps.model.parameters()))))
        del steps, done
        torch.cuda.empty_cache()
    return {"losses": outcomes[0][0], "bitwise_equal": outcomes[0] == outcomes[1]}


def stock_of(name: str, hidden: int, heads: int, words: int, length: int) -> Stock:
    """A model of transformers with its own dropout rates."""
    wide = {"hidden_size": hidden, "num_attention_heads": heads, "vocab_size": words}
    own: dict[str, Any]
    if name == "gpt2":
        own = {"n_embd": hidden, "n_head": heads, "n_positions": length}
        own |= {"vocab_size": words, "loss_type": "ForCausalLMLoss"}
        return Stock("GPT2", own, "LMHeadModel", ("n_layer",))
    if name == "bert":
        own = {"max_position_embeddings": length, "loss_type": "ForMaskedLMLoss"}
        own |= {"intermediate_size": 4 * hidden}
        return Stock("Bert", wide | own, "ForMaskedLM")
    if name == "llama":
        own = {"num_key_value_heads": max(1, heads // 2)}
        return Stock("Llama", wide | own | {"intermediate_size": hidden * 8 // 48 * 16})
    own = {"d_model": hidden, "d_kv": hidden // heads, "d_ff": 4 * hidden}
    own |= {"num_heads": heads, "vocab_size": words, "decoder_start_token_id": 0}
    own |= {"feed_forward_proj": "gated-gelu"}
    return Stock("T5", own, "ForConditionalGeneration", ("num_layers",))


def train(
    name: str, precision: str, device: torch.device, settings: dict[str, Any] | None
) -> tuple[list[int], StepReport | None]:
    """Four steps of a transformers model; digests of all that must be equal."""
    hidden, depth, heads, words, *batch = LARGE if device.type == "cuda" else SMALL
    stock = stock_of(name, hidden, heads, words, batch[1])
    config = stock.config(depth=depth)
    model = stock.model(config, torch.device("cpu"), dtype=torch.float32).to(device)
    if precision == "pure bf16":
        model = model.to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    autocast = precision == "bf16 autocast"
    torch.manual_seed(1)
    numbers: list[int] = []
    report = None
    with session_of(model, settings) as opened:
        for _ in range(NUM_LAW_STEPS):
            ids = torch.randint(1, words, batch).to(device)
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
        torch.cuda.empty_cache()
        alone, report = train(name, precision, device, {**ALONE, "min_bytes": 1})
        torch.cuda.empty_cache()
        away, offloading = train(name, precision, device, OFFLOADING)
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


def main(
    bench: Bench,
    *,
    sizes: tuple[str, ...] = SIZES,
    models: tuple[str, ...] = tuple(NAMES),
    rounds: int = 3,
) -> None:
    """Run the cells that are missing.

    Args:
        sizes: HIDDENxLAYERS@BATCHxSEQUENCE
    """
    device = bench.device
    cells = bench.cells({"rounds": rounds})
    for size in sizes:
        cells.run(size, alternate, size, device, rounds)
        cells.run(f"{size} law", blocks_law, size, device)
    for precision in PRECISIONS:
        for name in models:
            cells.run(f"{name}, {precision}", model_cell, name, precision, device)
