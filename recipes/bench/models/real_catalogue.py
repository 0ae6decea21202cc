"""Which rows `real_models` knows: a model, a way to train it, a length, a column."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from recipes.bench.models.stock import num_tokens, shape_of

COLUMNS = (
    "keep",
    "gc",
    "gc every 2nd",
    "selective",
    "gc + trl",
    "trl",
    "ours",
    "ours max_overhead=0.1",
    "ours budget=0.4keep",
    "ours budget=2gc",
    "ours budget=1gc",
)
"""Columns of the default catalogue. Any `ours name=value ...` is a column too: settings
of `ssdtrain.offload`, and `budget=0.4keep`: a byte budget of 0.4 times the activation
peak of the row `keep` (or `gc`) of the same cell."""
PEERS = COLUMNS[:6]
"""Columns without ssdtrain."""


class Mode(str, Enum):
    """How the layers run."""

    EAGER = "eager"
    LAYERS = "compiled"
    """Every layer under `torch.compile`."""
    FSDP2 = "fsdp2"
    """`fully_shard` on every layer, two ranks, fp32 master weights."""
    TENSOR = "tp"
    """Tensor parallel layers with sequence parallel norms, two ranks."""

    @property
    def has_mesh(self) -> bool:
        """Whether the model's weights are on a mesh."""
        return self in (Mode.FSDP2, Mode.TENSOR)

    @property
    def num_ranks(self) -> int:
        """Processes of a row."""
        return 2 if self.has_mesh else 1


class Tuned(str, Enum):
    """What is trained."""

    FULL = "full"
    LORA = "lora"
    """peft, rank 16, on all linear layers; its weights in the model's dtype."""


@dataclass(frozen=True)
class Row:
    """One process: a model, what is trained, tokens a step (such as `8k`), how, and a
    column."""

    model: str
    tuned: Tuned
    tokens: str
    mode: Mode
    column: str

    @property
    def cell(self) -> str:
        """All but the column."""
        return f"{self.model}/{self.tuned.value}/{self.tokens}/{self.mode.value}"

    @property
    def name(self) -> str:
        """Such as `qwen3-4b/full/8k/eager/ours`."""
        return f"{self.cell}/{self.column}"

    @property
    def baseline(self) -> str:
        """The row that this one is measured over."""
        return f"{self.cell}/keep"

    @property
    def is_ours(self) -> bool:
        """Whether ssdtrain runs in it."""
        return self.column.split()[0] == "ours"


def row_of(name: str) -> Row:
    """The row with this name.

    Raises:
        ValueError: a part of the name is unknown; says which.
    """
    parts = name.split("/", 4)
    if len(parts) != 5:
        raise ValueError(f"expects model/tuned/tokens/mode/column, got {name!r}")
    model, tuned, tokens, mode, column = parts
    shape_of(model)
    num_tokens(tokens)
    if column.split()[0] != "ours" and column not in PEERS:
        raise ValueError(f"expects `ours ...` or one of {PEERS}, got {column!r}")
    budget_of(column)
    return Row(model, Tuned(tuned), tokens, Mode(mode), column)


def budget_of(column: str) -> tuple[float, str] | None:
    """How many times the peak of which other column a budget is; None: there is none.

    Raises:
        ValueError: not a number and a column, such as `0.4keep`.
    """
    for part in column.split()[1:]:
        if part.startswith("budget="):
            match = re.fullmatch(r"budget=([0-9.]+)(keep|gc)", part)
            if match is None:
                raise ValueError(f"expects such as budget=0.4keep, got {part!r}")
            return float(match[1]), match[2]
    return None


def settings_of(column: str) -> dict[str, Any]:
    """Arguments of `ssdtrain.offload` in an `ours` column."""
    found: dict[str, Any] = {}
    for part in column.split()[1:]:
        name, _, value = part.partition("=")
        if name == "budget":
            continue
        try:
            number = float(value)
        except ValueError:
            found[name] = value
        else:
            found[name] = int(number) if number.is_integer() else number
    return found


def catalogue() -> Iterator[Row]:
    """Every row, the most telling first."""
    cells = [
        ("qwen3-1.7b", Tuned.FULL, "8k", Mode.EAGER),
        ("qwen3-4b", Tuned.FULL, "8k", Mode.EAGER),
        ("qwen3-8b", Tuned.LORA, "8k", Mode.EAGER),
        ("mistral-7b", Tuned.LORA, "8k", Mode.EAGER),
        ("qwen3-4b", Tuned.FULL, "32k", Mode.EAGER),
        ("qwen3-8b", Tuned.LORA, "32k", Mode.EAGER),
        ("qwen3-1.7b", Tuned.FULL, "16k", Mode.LAYERS),
        ("moe", Tuned.FULL, "16k", Mode.EAGER),
        ("qwen3-4b", Tuned.FULL, "8k", Mode.FSDP2),
        ("qwen3-4b", Tuned.FULL, "16k", Mode.TENSOR),
        ("qwen3-8b", Tuned.LORA, "128k", Mode.EAGER),
    ]
    for model, tuned, tokens, mode in cells:
        for column in COLUMNS:
            yield Row(model, tuned, tokens, mode, column)
