"""Stock models of many architectures: real widths, a few layers, random weights.

Decoders, a mixture of experts, encoders and decoders, images and sound, each built from
its configuration in transformers and trained by the loop that users write. From 16k
tokens on, and only there, the loss of decoders is Liger's fused one: logits would be
most of the memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from recipes.bench.models.real_build import fuse_the_loss
from recipes.bench.models.real_catalogue import KIB, num_tokens

FUSED_FROM = 16 * KIB
"""Tokens of a step."""
NUM_FRAMES = 3000
"""Of half a minute of sound, as Whisper hears it."""
TINY = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 64),
    **dict.fromkeys(("intermediate_size", "d_ff"), 128),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 128),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("head_dim", "d_kv"), 16),
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "vocab_size": 211,
    "image_size": 32,
}
"""Instead of the real widths, for a run without a GPU."""


@dataclass(frozen=True)
class Stock:
    """An architecture at its real width.

    kind: of the classes in transformers. layers: names of the numbers of layers.
    """

    kind: str
    settings: Mapping[str, Any]
    head: str = "ForCausalLM"
    layers: tuple[str, ...] = ("num_hidden_layers",)
    inputs: str = "tokens"
    """`tokens`, `images` or `sound`."""
    fused: str = ""
    """Liger's name of it."""


def _decoder(
    kind: str,
    hidden: int,
    inside: int,
    heads: tuple[int, int, int],
    vocabulary: int,
    tied: bool = False,
    **others: Any,
) -> Stock:
    """heads: of queries, of keys and values, and how wide one is."""
    settings = {
        "hidden_size": hidden,
        "intermediate_size": inside,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        **others,
    }
    return Stock(kind, settings, fused=kind.lower())


STOCK = {
    "qwen3-1.7b": _decoder("Qwen3", 2048, 6144, (16, 8, 128), 151936, True),
    "qwen3-4b": _decoder("Qwen3", 2560, 9728, (32, 8, 128), 151936, True),
    "qwen3-8b": _decoder("Qwen3", 4096, 12288, (32, 8, 128), 151936),
    "mistral-7b": _decoder(
        *("Mistral", 4096, 14336, (32, 8, 128), 32768), sliding_window=None
    ),
    "llama-1b": _decoder("Llama", 2048, 8192, (32, 8, 64), 128256, True),
    "llama-8b": _decoder("Llama", 4096, 14336, (32, 8, 128), 128256),
    "gemma2-2b": _decoder("Gemma2", 2304, 9216, (8, 4, 256), 256000, True),
    "phi3-mini": _decoder("Phi3", 3072, 8192, (32, 32, 96), 32064),
    "olmo2-7b": _decoder("Olmo2", 4096, 11008, (32, 32, 128), 100352),
    "moe": Stock(
        "Qwen3Moe",
        {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "num_experts": 32,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "tie_word_embeddings": True,
        },
        fused="qwen3_moe",
    ),
    "gpt2-large": Stock(
        "GPT2",
        {"n_embd": 1280, "n_head": 20, "n_positions": KIB, "vocab_size": 50257},
        "LMHeadModel",
        ("n_layer",),
    ),
    "bert-large": Stock(
        "Bert",
        {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_attention_heads": 16,
            "vocab_size": 30522,
        },
        "ForMaskedLM",
    ),
    "t5-large": Stock(
        "T5",
        {
            "d_model": 1024,
            "d_ff": 2816,
            "d_kv": 64,
            "num_heads": 16,
            "vocab_size": 32128,
            "feed_forward_proj": "gated-gelu",
            "decoder_start_token_id": 0,
        },
        "ForConditionalGeneration",
        ("num_layers", "num_decoder_layers"),
    ),
    "vit-large": Stock(
        "ViT",
        {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_attention_heads": 16,
            "image_size": 224,
        },
        "ForImageClassification",
        inputs="images",
    ),
    "whisper-large": Stock(
        "Whisper",
        {
            "d_model": 1280,
            "encoder_ffn_dim": 5120,
            "decoder_ffn_dim": 5120,
            "encoder_attention_heads": 20,
            "decoder_attention_heads": 20,
            "vocab_size": 51866,
            "decoder_start_token_id": 0,
        },
        "ForConditionalGeneration",
        ("encoder_layers", "decoder_layers"),
        "sound",
    ),
}


@dataclass(frozen=True)
class Case:
    """A model, how much of it is trained, and a batch."""

    model: str
    layers: int
    tuned: str
    """`full` or `lora`."""
    batch: int
    length: int
    """Tokens of a sequence; of images nothing, of sound those of its text."""

    @property
    def num_tokens(self) -> int:
        """Of a step."""
        return self.batch * self.length

    @property
    def stock(self) -> Stock:
        """The architecture."""
        return STOCK[self.model]

    @property
    def is_fused(self) -> bool:
        """Whether its loss is Liger's."""
        return bool(self.stock.fused) and self.num_tokens >= FUSED_FROM


def case_of(name: str) -> Case:
    """Such as `qwen3-4b:6/full/1x8k`: model, layers, what is trained, batch x length.

    Raises:
        ValueError: there is none of that name; says what is expected.
    """
    model, tuned, shape = [*name.split("/"), "", ""][:3]
    kind, _, layers = model.partition(":")
    batch, _, length = shape.partition("x")
    is_known = kind in STOCK and tuned in ("full", "lora")
    if not is_known or not (layers.isdigit() and batch.isdigit()):
        raise ValueError(
            f"expects MODEL:LAYERS/full|lora/BATCHxLENGTH with one of {list(STOCK)}, "
            f"got {name!r}"
        )
    return Case(kind, int(layers), tuned, int(batch), num_tokens(length))


def smaller(case: Case) -> Case:
    """The same, as small as it can be."""
    few, short = min(case.layers, 3), min(case.length, 32)
    return replace(case, layers=few, batch=min(case.batch, 2), length=short)


def config_of(case: Case, tiny: bool) -> Any:
    """The configuration object of transformers."""
    import transformers

    stock = case.stock
    settings = dict(stock.settings)
    if tiny:
        settings = {name: TINY.get(name, each) for name, each in settings.items()}
    settings.update(dict.fromkeys(stock.layers, case.layers))
    if stock.inputs != "images":
        # As transformers' Trainer sets it. No random token is one of padding.
        settings |= {"use_cache": False, "bos_token_id": None, "eos_token_id": None}
        settings["pad_token_id"] = settings.get("decoder_start_token_id")
    if "n_positions" not in settings and "hidden_size" in settings:
        settings["max_position_embeddings"] = max(case.length, KIB)
    return getattr(transformers, f"{stock.kind}Config")(**settings)


def build(case: Case, device: torch.device, tiny: bool = False) -> nn.Module:
    """The model on its device, in training mode."""
    import transformers

    stock, config = case.stock, config_of(case, tiny)
    if case.is_fused and device.type == "cuda":
        fuse_the_loss(stock.fused)
    kind = getattr(transformers, f"{stock.kind}{stock.head}")
    torch.manual_seed(0)
    with device:
        model: nn.Module = kind._from_config(config, dtype=torch.bfloat16)
    model.train()
    if case.tuned == "lora":
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
        model = get_peft_model(model, lora, autocast_adapter_dtype=False)  # type: ignore[arg-type]
    return model


def inputs_of(case: Case, model: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """The arguments of a forward that gives a loss; the same ones every time."""
    config: Any = model.config
    draw = torch.Generator(device).manual_seed(1)

    def noise(*shape: int) -> Tensor:
        made = torch.randn(shape, generator=draw, device=device)
        return made.bfloat16()

    def tokens(most: int, *shape: int) -> Tensor:
        return torch.randint(1, most, shape, generator=draw, device=device)

    if case.stock.inputs == "images":
        side = config.image_size
        labels = tokens(config.num_labels, case.batch)
        return {"pixel_values": noise(case.batch, 3, side, side), "labels": labels}
    ids = tokens(config.vocab_size, case.batch, case.length)
    if case.stock.inputs == "sound":
        heard = noise(case.batch, config.num_mel_bins, NUM_FRAMES)
        return {"input_features": heard, "labels": ids}
    return {"input_ids": ids, "labels": ids}
