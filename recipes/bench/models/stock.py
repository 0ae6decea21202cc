"""Stock models of many architectures: real widths, a few layers, random weights.

Each is built from its configuration in transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

KIB = 1024
NUM_FRAMES = 3000
"""Of half a minute of sound, as Whisper hears it."""
LAYERS = ("num_hidden_layers",)
TINY = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "hidden"), 64),
    **dict.fromkeys(("intermediate_size", "d_ff"), 128),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 128),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("head_dim", "d_kv"), 16),
    **dict.fromkeys((*LAYERS, "encoder_layers", "decoder_layers", "layers"), 3),
    **dict.fromkeys(("num_layers", "num_decoder_layers"), 3),
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "vocab_size": 211,
    "image_size": 32,
}
"""Instead of the real sizes, for a run without a GPU."""


def shrunk(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The same architecture, as small as it can be."""
    return {
        name: shrunk(value) if isinstance(value, dict) else TINY.get(name, value)
        for name, value in settings.items()
    }


@dataclass(frozen=True)
class Stock:
    """An architecture of transformers.

    kind: of its classes. layers: names of the numbers of layers. depth: how many the
    published model has.
    """

    kind: str
    settings: Mapping[str, Any]
    head: str = "ForCausalLM"
    layers: tuple[str, ...] = LAYERS
    inputs: str = "tokens"
    """`tokens`, `images`, `sound`, `waves`, `pairs` (images with texts) or `both`
    (images before tokens)."""
    fused: str = ""
    """Liger's name of it."""
    depth: int = 0

    def config(
        self, length: int = 0, *, tiny: bool = False, depth: int | None = None
    ) -> Any:
        """The configuration object of transformers.

        Args:
            length: most tokens; 0: as the architecture has it.
            depth: layers, if not those of the settings.
        """
        import transformers

        settings = shrunk(self.settings) if tiny else dict(self.settings)
        if depth is not None:
            settings |= dict.fromkeys(self.layers, depth)
        if self.inputs in ("tokens", "sound"):
            # As transformers' Trainer sets it. No random token is one of padding.
            pad = settings.get("decoder_start_token_id")
            free = {"use_cache": False, "bos_token_id": None, "eos_token_id": None}
            settings = {"pad_token_id": pad, **settings, **free}
        if length and "n_positions" not in settings and "hidden_size" in settings:
            least = 32 * KIB if self.fused else KIB
            settings["max_position_embeddings"] = max(length, least)
        return getattr(transformers, f"{self.kind}Config")(**settings)

    def model(self, config: Any, device: torch.device, **more: Any) -> nn.Module:
        """In training mode, with random weights of one seed."""
        import transformers

        kind = getattr(transformers, f"{self.kind}{self.head}")
        torch.manual_seed(0)
        with device:
            model = kind._from_config(config, **{"dtype": torch.bfloat16, **more})
        # Some make a parameter without asking for the device.
        return model.to(device).train()  # type: ignore[no-any-return]

    def batch(
        self, config: Any, rows: int, length: int, device: torch.device
    ) -> dict[str, Tensor]:
        """Arguments of a forward that gives a loss; the same ones every time."""
        draw = torch.Generator(device).manual_seed(1)

        def noise(*shape: int) -> Tensor:
            made = torch.randn(shape, generator=draw, device=device)
            return made.bfloat16()

        def tokens(most: int, *shape: int, least: int = 3) -> Tensor:
            return torch.randint(least, most, shape, generator=draw, device=device)

        def images(of: Any) -> Tensor:
            return noise(rows, 3, of.image_size, of.image_size)

        if self.inputs == "images":
            labels = tokens(config.num_labels, rows, least=0)
            return {"pixel_values": images(config), "labels": labels}
        if self.inputs == "waves":
            labels = tokens(config.num_labels, rows, least=0)
            return {"input_values": noise(rows, length), "labels": labels}
        if self.inputs == "pairs":
            ids = tokens(config.text_config.vocab_size, rows, length)
            return {"pixel_values": images(config.vision_config), "input_ids": ids}
        if self.inputs == "both":
            vision = config.vision_config
            num = (vision.image_size // vision.patch_size) ** 2
            ids = tokens(config.text_config.vocab_size, rows, length + num)
            ids[:, :num] = config.image_token_id
            both = {"input_ids": ids, "labels": ids}
            return {"pixel_values": images(vision), **both}
        ids = tokens(config.vocab_size, rows, length)
        if self.inputs == "sound":
            heard = noise(rows, config.num_mel_bins, NUM_FRAMES)
            return {"input_features": heard, "labels": ids}
        return {"input_ids": ids, "labels": ids}


def fuse_the_loss(architecture: str) -> None:
    """Liger's fused linear cross-entropy, and nothing else of Liger."""
    from liger_kernel import transformers as liger

    apply = getattr(liger, f"apply_liger_kernel_to_{architecture}")
    apply(rope=False, rms_norm=False, swiglu=False, fused_linear_cross_entropy=True)


def checkpoint(model: Any, options: Mapping[str, Any] | None) -> None:
    """transformers' own checkpointing of every layer; None: no more."""
    name = "activation_checkpointing"
    if not hasattr(model, f"{name}_enable"):
        name = "gradient_checkpointing"
    if options is None:
        getattr(model, f"{name}_disable")()
    else:
        getattr(model, f"{name}_enable")(dict(options))


def with_lora(model: nn.Module) -> nn.Module:
    """peft, rank 16, on all linear layers; its weights in the model's dtype."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    return get_peft_model(model, config, autocast_adapter_dtype=False)  # type: ignore[arg-type]


def decoder(
    kind: str,
    depth: int,
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
    fused = {"Qwen3Moe": "qwen3_moe"}.get(kind, kind.lower())
    return Stock(kind, settings, fused=fused, depth=depth)


def encoder(hidden: int, layers: int, heads: int, **others: Any) -> dict[str, Any]:
    """Settings of one."""
    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden}
    return {
        **{**sizes, "num_hidden_layers": layers, "num_attention_heads": heads},
        **others,
    }


def experts(number: int, width: int) -> dict[str, Any]:
    """Of every layer, and how wide one is; a quarter are chosen."""
    return {
        "num_experts": number,
        "num_experts_per_tok": number // 4,
        "moe_intermediate_size": width,
        "norm_topk_prob": True,
    }


QWEN, WIDE = (32, 8, 128), 151936
STOCK = {
    "tiny": decoder("Qwen3", 3, 64, 128, (4, 2, 16), 211, True),
    "tiny-mistral": decoder(
        *("Mistral", 3, 64, 128, (4, 2, 16), 211), sliding_window=None
    ),
    "tiny-moe": decoder(
        *("Qwen3Moe", 3, 64, 32, (4, 2, 16), 211, True), **experts(8, 32)
    ),
    "qwen3-1.7b": decoder("Qwen3", 28, 2048, 6144, (16, 8, 128), WIDE, True),
    "qwen3-4b": decoder("Qwen3", 36, 2560, 9728, QWEN, WIDE, True),
    "qwen3-8b": decoder("Qwen3", 36, 4096, 12288, QWEN, WIDE),
    "mistral-7b": decoder(
        *("Mistral", 32, 4096, 14336, QWEN, 32768), sliding_window=None
    ),
    "llama-1b": decoder("Llama", 16, 2048, 8192, (32, 8, 64), 128256, True),
    "olmo2-7b": decoder("Olmo2", 32, 4096, 11008, (32, 32, 128), 100352),
    "moe": decoder(
        *("Qwen3Moe", 12, 2048, 6144, (16, 8, 128), WIDE, True), **experts(32, 768)
    ),
}


def shape_of(model: str) -> Stock:
    """The model that a name such as `qwen3-4b:24` means: so many layers.

    Raises:
        ValueError: no such model, or a number of layers that is none.
    """
    name, _, layers = model.partition(":")
    if name not in STOCK or (layers and not layers.isdigit()):
        raise ValueError(
            f"expects one of {sorted(STOCK)}, with ':layers' behind it for fewer "
            f"layers, got {model!r}"
        )
    stock = STOCK[name]
    return replace(stock, depth=int(layers)) if layers else stock


def num_tokens(text: str) -> int:
    """Such as 8192 for `8k`.

    Raises:
        ValueError: not a length.
    """
    digits = text.removesuffix("k")
    if not digits.isdigit():
        raise ValueError(f"expects tokens such as 512 or 8k, got {text!r}")
    return int(digits) * (KIB if text.endswith("k") else 1)
