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
    "ours limit=1.03gc",
)
"""Columns of the default catalogue. Any `ours name=value ...` is a column too: settings
of `ssdtrain.offload`, and two that are relative to another row of the same cell.
`budget=0.4keep` is a byte budget of 0.4 times keep's activation peak; `limit=1.03gc`
lets the process reserve 1.03 times what `gc` reserved and no more."""
RELATIVE = {"budget": "peak_gb", "limit": "reserved_gb"}
"""What a relative setting is a multiple of."""
HOST_COLUMNS = (
    "keep",
    "ours plan=keep-all recompute=off",
    "ours plan=keep-all",
    "ours plan=offload-all recompute=off",
    "ours",
)
"""Columns that say what a saved tensor costs the host."""
HOST_TOKENS = 512


class Mode(str, Enum):
    """How the layers run."""

    EAGER = "eager"
    LAYERS = "compiled"
    """Every layer under `torch.compile`."""
    FSDP2 = "fsdp2"
    """`fully_shard` on every layer, two ranks, fp32 master weights."""
    FSDP2_ONE = "fsdp2-1"
    """The same on a mesh of one rank: all of FSDP2's hooks, casts, gathers (copies) and
    reductions run, and nothing crosses a link between GPUs."""
    TENSOR = "tp"
    """Tensor parallel layers with sequence parallel norms, two ranks."""
    FSDP2_TENSOR = "fsdp2-tp"
    """FSDP2 over pairs of ranks that divide each layer, four ranks and more."""
    TENSOR_ONE = "tp-1"
    """The same on a mesh of one rank: DTensor runs and is what autograd saves; nothing
    is divided, no collective sends."""

    @property
    def num_ranks(self) -> int:
        """Processes of a row."""
        if self is Mode.FSDP2_TENSOR:
            return 4
        return 2 if self in (Mode.FSDP2, Mode.TENSOR) else 1

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 holds the model's weights."""
        return self in (Mode.FSDP2, Mode.FSDP2_ONE, Mode.FSDP2_TENSOR)

    @property
    def is_divided(self) -> bool:
        """Whether a layer's products are tensor parallel."""
        return self in (Mode.TENSOR, Mode.TENSOR_ONE, Mode.FSDP2_TENSOR)

    @property
    def has_mesh(self) -> bool:
        """Whether the model's weights are on a mesh."""
        return self.is_sharded or self.is_divided


class Tuned(str, Enum):
    """What is trained."""

    FULL = "full"
    LORA = "lora"
    """peft, rank 16, on all linear layers; its weights in the model's dtype."""


@dataclass(frozen=True)
class Row:
    """One process: a model, what is trained, tokens a step, how, and a column.

    tokens: such as `8k`, `512`; `2k-8k` draws a length for every step, `text` takes
    the lengths from a file.
    """

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
    num_tokens(tokens.split("-")[-1]) if tokens != "text" else 0
    if column.split()[0] != "ours" and column not in PEERS:
        raise ValueError(f"expects `ours ...` or one of {PEERS}, got {column!r}")
    relative_of(column)
    return Row(model, Tuned(tuned), tokens, Mode(mode), column)


PEERS = (*COLUMNS[:6], "partitioner 0.3")
"""Columns without ssdtrain; `partitioner 0.3` is the compiler's memory budget."""


def relative_of(column: str) -> dict[str, tuple[float, str]]:
    """Relative settings of a column: how many times which other column's figure.

    Raises:
        ValueError: not a number and a column, such as `0.4keep`.
    """
    found = {}
    for part in column.split()[1:]:
        name, _, value = part.partition("=")
        if name in RELATIVE:
            match = re.fullmatch(r"([0-9.]+)(keep|gc)", value)
            if match is None:
                raise ValueError(f"expects such as {name}=0.4keep, got {part!r}")
            found[name] = float(match[1]), match[2]
    return found


def settings_of(column: str) -> dict[str, Any]:
    """Arguments of `ssdtrain.offload` in an `ours` column."""
    found: dict[str, Any] = {}
    for part in column.split()[1:]:
        name, _, value = part.partition("=")
        if name in RELATIVE:
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
        ("qwen3-4b", Tuned.FULL, "2k-8k", Mode.EAGER),
        ("qwen3-4b", Tuned.FULL, "text", Mode.EAGER),
        ("qwen3-8b", Tuned.LORA, "128k", Mode.EAGER),
    ]
    for column in HOST_COLUMNS:
        yield Row("qwen3-4b", Tuned.FULL, str(HOST_TOKENS), Mode.EAGER, column)
    for model, tuned, tokens, mode in cells:
        for column in COLUMNS:
            yield Row(model, tuned, tokens, mode, column)
        if mode is Mode.LAYERS:
            yield Row(model, tuned, tokens, mode, "partitioner 0.3")
