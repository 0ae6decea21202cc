"""What `ssdtrain plan` and `ssdtrain rok` look at: a model for one micro-batch."""

import argparse
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ssdtrain.api
from ssdtrain.curves import Links
from ssdtrain.errors import ConfigError
from ssdtrain.plan.profile import Profile
from ssdtrain.tools.arguments import count_argument
from ssdtrain.tools.foresight.caveats import explained
from ssdtrain.tools.foresight.device import DeviceCosts
from ssdtrain.tools.report.estimate import estimate

MODELS = "blocks:4096x32 (hidden size, layers; or FILE.py:FUNCTION)"
"""What `--model` may be, for a message."""
HEAD_SIZE = 128
DROPOUT = 0.1
NUM_OBSERVED_STEPS = 3


class Subject(NamedTuple):
    """A model, and a function that runs its forward and gives a loss."""

    model: nn.Module
    forward: Callable[[], Any]


Build = Callable[[int], Subject]
"""From the micro-batch size, on torch's present default device."""


def add_batch(parser: argparse.ArgumentParser) -> None:
    """Add what says how large one micro-batch is."""
    parser.add_argument("--micro-batch", type=count_argument, default=1, metavar="N")
    parser.add_argument(
        "--sequence",
        type=count_argument,
        default=1024,
        help="of blocks: (default 1024)",
    )


class Block(nn.Module):
    """Causal attention and a GELU MLP, pre-norm, dropout 0.1."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.num_heads = max(1, hidden // HEAD_SIZE)
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.proj = nn.Linear(hidden, hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden) to the same."""
        batch, sequence, hidden = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, sequence, 3, self.num_heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        rate = DROPOUT if self.training else 0.0
        mixed = F.scaled_dot_product_attention(
            query, key, value, dropout_p=rate, is_causal=True
        )
        mixed = mixed.transpose(1, 2).reshape(batch, sequence, hidden)
        x = x + self.dropout(self.proj(mixed))
        summed: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))
        return summed


class Blocks(nn.Module):
    """`num_layers` blocks in bf16; gives the mean square of the last one's output."""

    def __init__(self, hidden: int, num_layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(num_layers))
        self.to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden) to a scalar."""
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def build_of(text: str, sequence: int) -> Build:
    """Return what `--model` names: `blocks:HIDDENxLAYERS`, or `FILE.py:FUNCTION`.
    Raises ConfigError: neither."""
    place, _, name = text.rpartition(":")
    if place == "blocks":
        return _blocks(name, sequence)
    if not place.endswith(".py"):
        raise ConfigError(
            "--model expects blocks:HIDDENxLAYERS, such as blocks:8192x4, or "
            f"FILE.py:FUNCTION, got {text!r}."
        )
    return users_build(text, "--model ")


def users_build(text: str, option: str = "") -> Build:
    """Return the user's function `FILE.py:FUNCTION` of a micro-batch size; `option`:
    what the command calls it. Raises ConfigError: there is none that takes a size."""
    name = f"{option}{text}"
    function = function_of(text, option)
    if isinstance(function, nn.Module | type) or not _takes_a_size(function):
        raise ConfigError(
            f"{name} expects a function of one argument, the size of a micro-batch; "
            "for example: def build(micro_batch): ... return model, lambda: "
            "model(x).mean()"
        )
    return lambda micro_batch: _subject_of(name, function, micro_batch)


def _takes_a_size(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(1)
    except TypeError:
        return False
    return True


def _subject_of(name: str, function: Callable[..., Any], micro_batch: int) -> Subject:
    """Build what a user's function makes. Raises ConfigError: it raised, or gave
    something else than (module, forward)."""
    try:
        given = function(micro_batch)
    except ConfigError:
        raise
    except Exception as error:
        raise explained(error, f"{name} failed") from error
    parts = given if isinstance(given, tuple | list) else (given,)
    is_pair = len(parts) == 2 and isinstance(parts[0], nn.Module)
    if not is_pair or not callable(parts[1]):
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise ConfigError(
            f"{name}: the function expects to give (module, forward), where "
            f"forward() gives the loss, got {kinds}; for example: return model, "
            "lambda: model(x).mean()"
        )
    return Subject(*parts)


def function_of(text: str, option: str) -> Callable[..., Any]:
    """Return the function that `FILE.py:FUNCTION` names. ConfigError: there is none."""
    place, _, name = text.rpartition(":")
    if not place.endswith(".py"):
        raise ConfigError(f"{option}expects FILE.py:FUNCTION, got {text!r}.")
    if not Path(place).is_file():
        raise ConfigError(f"{option}{text}: there is no file {Path(place).resolve()}.")
    spec = importlib.util.spec_from_file_location("ssdtrain_subject", place)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{option}{place} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise explained(error, f"{option}{text} cannot be imported") from error
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{option}{place} has no function {name!r}")
    return function


def _blocks(text: str, sequence: int) -> Build:
    try:
        hidden, num_layers = map(count_argument, text.split("x"))
    except (ValueError, argparse.ArgumentTypeError):
        raise ConfigError(
            f"--model blocks: expects HIDDENxLAYERS, such as 8192x4, got {text!r}"
        ) from None

    def build(micro_batch: int) -> Subject:
        model = Blocks(hidden, num_layers).train()
        shape = (micro_batch, sequence, hidden)
        x = torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)
        return Subject(model, lambda: model(x * 1))

    return build


def estimated(
    build: Build,
    micro_batch: int,
    links: Links,
    device: DeviceCosts,
    min_bytes: int,
    *,
    optimizer: str | None = None,
) -> Profile:
    """Return the profile on the meta device; an optimizer makes gradients anew."""
    with torch.device("meta"):
        subject = build(micro_batch)
        return estimate(
            subject.model,
            subject.forward,
            links,
            device,
            min_bytes=min_bytes,
            optimizer=optimizer,
            keeps_gradients=optimizer is None,
        ).profile


def observed(
    build: Build, micro_batch: int, min_bytes: int, **settings: Any
) -> Profile:
    """Return the profile of real steps here. ConfigError: nothing was observed."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        subject = build(micro_batch)
    weights = list(subject.model.parameters())
    with ssdtrain.api.offload(
        subject.model, plan="auto", min_bytes=min_bytes, **settings
    ) as session:
        for _ in range(NUM_OBSERVED_STEPS):
            subject.forward().backward()
            with torch.no_grad():
                for weight in weights:
                    weight.add_(0)  # a new version: the step has ended
                    weight.grad = None
        profile = session.profile
    if profile is None:
        raise ConfigError(
            f"no saved tensor of at least {min_bytes} bytes was observed; set "
            "--min-bytes lower, or give a larger --micro-batch."
        )
    return profile
