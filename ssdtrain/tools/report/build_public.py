"""Models for `ssdtrain fits`: from a config.json, a short name or a user's file, on the
meta device, with LoRA and a fused loss where asked for."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ssdtrain.errors import ConfigError
from ssdtrain.quantities import did_you_mean
from ssdtrain.tools.report.public_models import PUBLIC
from ssdtrain.tools.report.subject import Subject, users_build

RANK = 16
"""Of LoRA's matrices, on every linear layer but the head."""
T5_TOKENS, DECODED = 512, 448
"""Of a sequence of T5's encoder and decoder, and of Whisper's decoder."""
FRAMES = 3000
"""Of Whisper's input: 30 s."""
CLASSES = {
    "t5": "AutoModelForSeq2SeqLM",
    "vit": "AutoModelForImageClassification",
    "whisper": "AutoModelForSpeechSeq2Seq",
    "bert": "AutoModelForMaskedLM",
}
"""Of transformers, by model type; the others predict the next token."""
YOURS, MOST_TOLD = "build it by a function of your own, FILE.py:FUNCTION", 200
"""What to do instead, and letters of an error of transformers."""
LAYERS = "num_hidden_layers"
LENGTH = "max_position_embeddings"


class Train(str, Enum):
    """What is trained."""

    FULL = "full"
    LORA = "lora"


class Loss(str, Enum):
    """How a language model's loss is computed."""

    STOCK = "stock"
    """As transformers does: all logits at once, in fp32."""
    FUSED = "fused"
    """A chunk of the logits at a time, as Liger's fused linear cross-entropy."""


@dataclass(frozen=True)
class Shape:
    """A configuration of transformers, and how it is trained."""

    values: Mapping[str, Any]
    train: Train
    loss: Loss

    @property
    def num_layers(self) -> int | None:
        """Layers of a stack of one kind; None: it has several."""
        found = self.values.get(LAYERS)
        return found if isinstance(found, int) else None

    @property
    def is_causal(self) -> bool:
        """Whether it predicts the next token of one sequence."""
        return self.values["model_type"] not in CLASSES

    @property
    def period(self) -> int:
        """After so many layers their kinds repeat."""
        kinds = list(self.kinds)
        for length in range(1, len(kinds)):
            if kinds[length:] == kinds[:-length]:
                return length
        return 1

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of the layers, such as sliding and full attention; empty: all the
        same."""
        if self.num_layers is None:
            return ()
        return tuple(getattr(public_config(self), "layer_types", None) or ())

    def with_layers(self, number: int) -> "Shape":
        """Return the same with fewer layers of its stack."""
        values = {**self.values, LAYERS: number}
        if "layer_types" in values or len(set(self.kinds)) > 1:
            values["layer_types"] = list(self.kinds[:number])
        return replace(self, values=values)


def shape_of(text: str, train: Train, loss: Loss) -> Shape:
    """Return what MODEL names: a short name, a config.json or its directory, or an id
    of the local Hugging Face cache. Nothing is downloaded. Raises ConfigError: it names
    nothing that is here; the text has near names."""
    if text.endswith(".py"):
        raise ConfigError(f"{text} is a file: name its function, such as {text}:build")
    name = text.lower()
    if name in PUBLIC:
        return Shape(PUBLIC[name], train, loss)
    for path in _places(text):
        if path.is_file():
            try:
                values = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise ConfigError(f"{path} cannot be read as JSON ({error})") from error
            if not isinstance(values, dict) or "model_type" not in values:
                raise ConfigError(f"{path} expects a config.json with a model_type")
            return Shape(values, train, loss)
    raise ConfigError(
        f"MODEL expects a config.json, a model of the local Hugging Face cache, "
        f"FILE.py:FUNCTION or one of {', '.join(PUBLIC)}, got {text!r}"
        f"{did_you_mean(name.rpartition('/')[2], PUBLIC)}"
    )


def _places(text: str) -> list[Path]:
    """Return where a config.json may be."""
    given = Path(text).expanduser()
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()
    cached = hub / f"models--{text.replace('/', '--')}" / "snapshots"
    found = sorted(cached.glob("*/config.json")) if "/" in text else []
    return [given, given / "config.json", *found]


def public_config(shape: Shape) -> Any:
    """Return the configuration. Raises ConfigError: transformers does not know it."""
    from transformers import AutoConfig

    values = dict(shape.values)
    kind = values.pop("model_type")
    for name in ("torch_dtype", "dtype", "quantization_config", "architectures"):
        values.pop(name, None)
    values |= {"use_cache": False}
    try:
        return AutoConfig.for_model(kind, **values)
    except Exception as error:
        raise _unbuilt(kind, error) from error


def _unbuilt(kind: str, error: Exception) -> ConfigError:
    told = " ".join(str(error).split())[:MOST_TOLD]  # it lists all kinds of models
    return ConfigError(f"transformers cannot build {kind}: {told}; {YOURS}")


def _zeros(*size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.long)


def public_subject(
    shape: Shape, tokens: int, ids: Callable[..., Tensor] = _zeros
) -> Subject:
    """Build the model in bf16 on torch's default device, and a step of about so many
    tokens; `ids` of a size gives token ids and labels."""
    import transformers

    config = public_config(shape)
    if getattr(config, LENGTH, tokens) < tokens:
        setattr(config, LENGTH, tokens)
    kind = shape.values["model_type"]
    if kind not in CLASSES and getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"{kind} has an encoder and a decoder, as t5 and whisper that are known; "
            f"{YOURS}"
        )
    wanted = CLASSES.get(kind, "AutoModelForCausalLM")
    made = partial(getattr(transformers, wanted).from_config, config)
    try:
        try:
            model = made(dtype=torch.bfloat16, attn_implementation="sdpa")
        except ValueError:  # it has none of its own
            model = made(dtype=torch.bfloat16, attn_implementation="eager")
    except Exception as error:
        raise _unbuilt(kind, error) from error
    model.train()
    if shape.train is Train.LORA:
        add_lora(model)
    return Subject(model, _step(kind, model, config, tokens, shape.loss, ids))


def _step(
    kind: str,
    model: Any,
    config: Any,
    tokens: int,
    loss: Loss,
    ids: Callable[..., Tensor],
) -> Callable[[], Any]:
    if kind == "vit":
        patches = (config.image_size // config.patch_size) ** 2 + 1
        batch = max(1, tokens // patches)
        side = config.image_size
        pixels = torch.zeros(batch, 3, side, side, dtype=torch.bfloat16)
        labels = ids(batch)
        return lambda: F.cross_entropy(model(pixel_values=pixels).logits, labels)
    if kind == "whisper":
        batch = max(1, tokens // (FRAMES // 2 + DECODED))
        sound = torch.zeros(batch, config.num_mel_bins, FRAMES, dtype=torch.bfloat16)
        words = ids(batch, DECODED)
        return lambda: model(input_features=sound, labels=words).loss
    if kind == "t5":
        words = ids(max(1, tokens // (2 * T5_TOKENS)), T5_TOKENS)
        return lambda: model(input_ids=words, labels=words).loss
    words = ids(1, tokens)
    if loss is Loss.FUSED:
        inner, head = model.get_decoder(), model.get_output_embeddings()

        def fused() -> Any:
            hidden = inner(input_ids=words).last_hidden_state
            apply: Callable[..., Any] = FusedLoss.apply
            return apply(hidden.flatten(0, 1), head.weight, words.flatten())

        return fused
    return lambda: model(input_ids=words, labels=words).loss


class FusedLoss(torch.autograd.Function):
    """Loss and gradients of the head, a chunk of the rows at a time."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """(rows, hidden), (words, hidden), (rows) to a scalar."""
        rows, width = hidden.shape
        parts = -(-weight.shape[0] // width)
        chunk = 1 << (max(1, -(-rows // parts)) - 1).bit_length()
        by_hidden = torch.empty_like(hidden)
        by_weight = torch.zeros_like(weight) if weight.requires_grad else None
        loss = torch.zeros((), dtype=torch.float32)
        for start in range(0, rows, chunk):
            own = hidden[start : start + chunk]
            logits = own @ weight.t()
            logits = torch.softmax(logits, -1, dtype=torch.bfloat16)
            loss = loss + logits[:, 0].float().sum()
            by_hidden[start : start + chunk] = logits @ weight
            if by_weight is not None:
                by_weight.addmm_(logits.t(), own)
        ctx.save_for_backward(by_hidden)
        ctx.by_weight = by_weight
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Give the gradients that forward has made."""
        (by_hidden,) = ctx.saved_tensors
        return by_hidden, ctx.by_weight, None


class Lora(nn.Module):
    """A frozen linear layer and two small matrices next to it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        dtype = base.weight.dtype
        self.base = base
        self.down = nn.Linear(base.in_features, RANK, bias=False, dtype=dtype)
        self.up = nn.Linear(RANK, base.out_features, bias=False, dtype=dtype)

    def __getattr__(self, name: str) -> Any:
        """What a linear layer has, such as `weight`, for models that read it."""
        if name in ("base", "down", "up"):
            return super().__getattr__(name)
        return getattr(self.base, name)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, in) to (rows, out)."""
        found: Tensor = self.base(x) + self.up(self.down(x)) * 2.0
        return found


def add_lora(model: Any) -> None:
    """Freeze the model, and train small matrices next to every linear layer."""
    model.requires_grad_(False)
    head = model.get_output_embeddings()
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear) and child is not head
    ]
    for parent, name, child in found:
        setattr(parent, name, Lora(child))


def user_subject(text: str, train: Train, micro_batch: int) -> Subject:
    """Build what FILE.py:FUNCTION makes of a size. Raises ConfigError: it cannot."""
    subject = users_build(text)(micro_batch)
    if train is Train.LORA:
        raise ConfigError(
            f"--train lora is for public models; let {text} freeze its weights and add "
            "its adapters itself."
        )
    return subject
