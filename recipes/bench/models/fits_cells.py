"""What `ssdtrain fits` foretells, and then what an H100 measures, cell by cell.

    python -m recipes.bench models.fits_cells --predict    # no GPU; commit it first
    python -m recipes.bench models.fits_cells              # one H100, four minutes
    python -m recipes.bench models.fits_cells --tiny --out cells.json    # any machine

A cell is a model of some layers, its tokens, and plain training, checkpointing of every
layer or selective checkpointing. One model at a time is built from random weights; a
step is forward, backward and AdamW. The prediction of a cell is read from the file that
`--predict` wrote, never made anew. A rerun goes on with the cells that are missing.
"""

import gc
import json
import statistics
import warnings
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from recipes.bench.harness.cells import Cells
from recipes.bench.harness.cli import Bench, UsageError
from recipes.bench.harness.timing import wait
from recipes.bench.models.real_row import selective_contexts
from ssdtrain.tools.foresight.device import load_device
from ssdtrain.tools.report.build_public import (
    DECODED,
    FRAMES,
    Loss,
    Shape,
    Train,
    public_subject,
    shape_of,
)
from ssdtrain.tools.report.capture import Question, capture
from ssdtrain.tools.report.fits import CHECKPOINTING, PLAIN, SELECTIVE, priced_ways

GPU = "h100"
PREDICTED = Path(__file__).with_name("fits_cells_predicted.json")
MODES = (PLAIN, CHECKPOINTING, SELECTIVE)
POINTS = (
    "llama-3.2-1b/full/4k",
    "llama-3.2-1b/full/8k",
    "llama-3.2-1b/full/16k",
    "qwen3-1.7b/full/4k",
    "qwen3-1.7b/full/8k",
    "llama-3.1-8b:8/full/4k",
    "llama-3.1-8b:8/full/8k",
    "mistral-7b:12/full/8k",
    "qwen3-8b:10/lora/8k",
    "qwen3-8b:10/lora/16k",
    "gemma-2-2b:12/full/4k",
    "vit-huge/full/16k",
    "whisper-large-v3/full/8k",
)
"""Model, after a colon its layers where it has fewer, what is trained, tokens."""
NUM_WARM, NUM_TIMED = 2, 4
PEAK_ERROR, STEP_ERROR = 0.03, 0.10
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 211,
    "image_size": 28,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
}
"""Instead of the real widths, to try every path without a GPU."""


class Point(NamedTuple):
    """A model and its tokens."""

    model: str
    shape: Shape
    tokens: int


def point_of(text: str, *, tiny: bool = False) -> Point:
    """Return what a text of `POINTS` means."""
    model, trained, tokens = text.split("/")
    name, _, layers = model.partition(":")
    shape = shape_of(name, Train(trained), Loss.STOCK)
    if layers:
        shape = shape.with_layers(int(layers))
    number = int(tokens.removesuffix("k")) * 1024
    if tiny:
        small = {key: each for key, each in TINY.items() if key in shape.values}
        if shape.values["model_type"] == "whisper":
            small.pop("vocab_size")  # it has fixed words
        shape = Shape({**shape.values, **small}, shape.train, shape.loss)
        shape = shape if shape.num_layers is None else shape.with_layers(2)
        number = 256
    return Point(f"{model}/{trained}", shape, number)


def predicted(point: Point) -> dict[str, dict[str, float]]:
    """Return ms and bytes of each mode, without a GPU."""
    question = Question(
        model=point.model, train=point.shape.train, tokens=point.tokens, gpu=GPU
    )
    captured = capture(question, point.shape, load_device(GPU), point.tokens)
    return {
        mode: {"step_ms": round(ms, 2), "peak_bytes": peak}
        for mode, (ms, peak) in priced_ways(captured).items()
    }


class Side:
    """A model on the device, with its optimizer."""

    def __init__(self, point: Point, device: torch.device) -> None:
        with device:
            self.model: Any = public_subject(point.shape, point.tokens).model
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self._device = device
        self._kind = point.shape.values["model_type"]
        self._optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)

    def set_mode(self, mode: str) -> None:
        """Checkpoint all layers, some of what they make, or nothing."""
        with warnings.catch_warnings():  # newer releases have another name for it
            warnings.simplefilter("ignore", FutureWarning)
            self.model.gradient_checkpointing_disable()
            if mode != PLAIN:
                more = {"context_fn": selective_contexts} if mode == SELECTIVE else {}
                options = {"use_reentrant": False, **more}
                self.model.gradient_checkpointing_enable(options)

    def measured(self, tokens: int) -> dict[str, float]:
        """Return the median step and the peak of some steps."""
        loss_of = self._loss_of(tokens)
        times = []
        for number in range(NUM_WARM + NUM_TIMED):
            if number == NUM_WARM and self._device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            start = wait(self._device)
            loss_of().backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            times.append(1e3 * (wait(self._device) - start))
        peak = 0
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated()
        return {
            "step_ms": round(statistics.median(times[NUM_WARM:]), 2),
            "peak_bytes": peak,
        }

    def _loss_of(self, tokens: int) -> Callable[[], Any]:
        """As `public_subject`, on data that is not all alike."""
        model, config = self.model, self.model.config
        with self._device:
            if self._kind == "vit":
                side, patch = config.image_size, config.patch_size
                batch = max(1, tokens // ((side // patch) ** 2 + 1))
                pixels = torch.randn(batch, 3, side, side, dtype=torch.bfloat16)
                labels = torch.randint(config.num_labels, (batch,))
                return lambda: F.cross_entropy(
                    model(pixel_values=pixels).logits, labels
                )
            if self._kind == "whisper":
                batch = max(1, tokens // (FRAMES // 2 + DECODED))
                size = batch, config.num_mel_bins, FRAMES
                sound = torch.randn(size, dtype=torch.bfloat16)
                words = torch.randint(config.vocab_size, (batch, DECODED))
                return lambda: model(input_features=sound, labels=words).loss
            words = torch.randint(config.vocab_size, (1, tokens))
            return lambda: model(input_ids=words, labels=words).loss


def measure(cells: Cells, device: torch.device, points: list[str], tiny: bool) -> None:
    """Measure the cells that are missing; each model is built once."""
    side, built = None, ""
    for text in points:
        point = point_of(text, tiny=tiny)
        missing = [mode for mode in MODES if f"{text}/{mode}" not in cells]
        if not missing or cells.left_s() <= 0:
            continue
        if point.model != built:
            side = None
            gc.collect()
            torch.cuda.empty_cache()
            side, built = Side(point, device), point.model
        for mode in missing:
            cells.run(f"{text}/{mode}", _cell, side, mode, point.tokens)


def _cell(side: Side | None, mode: str, tokens: int) -> dict[str, Any]:
    if side is None:
        raise RuntimeError("a model is built before its cells")
    side.set_mode(mode)
    return side.measured(tokens)


def compared(
    cells: dict[str, dict[str, Any]], foretold: dict[str, dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Return each measured cell with what was foretold, and by what share it is off."""
    for name, cell in cells.items():
        text, _, mode = name.rpartition("/")
        told = foretold.get(text, {}).get(mode)
        if told is not None and cell.get("peak_bytes"):
            yield {
                "cell": name,
                "step_ms": cell["step_ms"],
                "peak_bytes": cell["peak_bytes"],
                "step_error": told["step_ms"] / cell["step_ms"] - 1,
                "peak_error": told["peak_bytes"] / cell["peak_bytes"] - 1,
                "foretold_ms": told["step_ms"],
            }


def orders(rows: list[dict[str, Any]]) -> tuple[int, int]:
    """Return how many pairs of modes of one point, whose steps differ by over a tenth,
    are foretold in the right order, and how many there are."""
    right = total = 0
    for one, other in combinations(rows, 2):
        if one["cell"].rpartition("/")[0] != other["cell"].rpartition("/")[0]:
            continue
        ratio = one["step_ms"] / other["step_ms"]
        if max(ratio, 1 / ratio) > 1 + STEP_ERROR:
            total += 1
            right += (one["foretold_ms"] < other["foretold_ms"]) == (ratio < 1)
    return right, total


def told(rows: list[dict[str, Any]]) -> str:
    """Return all rows, and in how many the promises are kept."""
    lines = [
        f"{row['cell']:42} step {row['step_ms']:8.1f} ms "
        f"{100 * row['step_error']:+6.1f} %   peak {row['peak_bytes'] / 1e9:6.2f} GB "
        f"{100 * row['peak_error']:+6.1f} %"
        for row in rows
    ]
    if rows:
        steps = [abs(row["step_error"]) for row in rows]
        peaks = [abs(row["peak_error"]) for row in rows]
        right, total = orders(rows)
        lines += [
            f"{len(rows)} cells; peak within 3 %: "
            f"{sum(e <= PEAK_ERROR for e in peaks)}, worst {100 * max(peaks):.1f} %",
            f"step within 10 %: {sum(e <= STEP_ERROR for e in steps)}, median "
            f"{100 * statistics.median(steps):.1f} %, worst {100 * max(steps):.1f} %",
            f"order of steps that differ by over 10 %: {right} of {total} right",
        ]
    return "\n".join(lines)


def main(
    bench: Bench,
    *,
    predict: bool = False,
    predictions: Path = PREDICTED,
    points: str = "",
    tiny: bool = False,
) -> None:
    """Predict, or measure and compare.

    Args:
        predict: no GPU; write it first
        predictions: where they are
        points: whose text has this in it
        tiny: every path, on a CPU
    """
    wanted = [text for text in POINTS if points in text]
    if predict:
        found = {text: predicted(point_of(text, tiny=tiny)) for text in wanted}
        written = {"gpu": GPU, "cells": found}
        predictions.write_text(json.dumps(written, indent=1) + "\n")
        return
    foretold = json.loads(predictions.read_text(encoding="utf-8"))["cells"]
    if not tiny and (lacking := [text for text in wanted if text not in foretold]):
        raise UsageError(f"expected predictions of {lacking}; run --predict first")
    cells = bench.cells({"tiny": tiny})
    device = torch.device("cpu") if tiny else bench.device
    measure(cells, device, wanted, tiny)
    print(told(list(compared(cells.data["cells"], foretold))))
    missing = [t for t in wanted for mode in MODES if f"{t}/{mode}" not in cells]
    print(f"{len(missing)} cells are missing" if missing else "all cells ran")
