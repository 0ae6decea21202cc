"""Shapes of public models, as in their `config.json`; random weights take as much
memory."""

from collections.abc import Mapping
from typing import Any


def _llama(
    hidden: int, layers: int, wide: int, heads: int, groups: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": wide,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        **more,
    }


def _qwen3(
    hidden: int, layers: int, wide: int, heads: int, *, tied: bool
) -> dict[str, Any]:
    shape = _llama(hidden, layers, wide, heads, 8, vocab_size=151936)
    own = {"model_type": "qwen3", "head_dim": 128, "tie_word_embeddings": tied}
    return {**shape, **own}


_GEMMA2 = {"model_type": "gemma2", "vocab_size": 256000, "head_dim": 256}
PUBLIC: Mapping[str, Mapping[str, Any]] = {
    "llama-3.2-1b": _llama(
        2048, 16, 8192, 32, 8, head_dim=64, tie_word_embeddings=True
    ),
    "llama-3.2-3b": _llama(
        3072, 28, 8192, 24, 8, head_dim=128, tie_word_embeddings=True
    ),
    "llama-3.1-8b": _llama(4096, 32, 14336, 32, 8),
    "llama-3.1-70b": _llama(8192, 80, 28672, 64, 8),
    "qwen3-0.6b": _qwen3(1024, 28, 3072, 16, tied=True),
    "qwen3-1.7b": _qwen3(2048, 28, 6144, 16, tied=True),
    "qwen3-4b": _qwen3(2560, 36, 9728, 32, tied=True),
    "qwen3-8b": _qwen3(4096, 36, 12288, 32, tied=False),
    "qwen3-14b": _qwen3(5120, 40, 17408, 40, tied=False),
    "qwen3-32b": _qwen3(5120, 64, 25600, 64, tied=False),
    "qwen2.5-7b": {
        **_llama(3584, 28, 18944, 28, 4, vocab_size=152064),
        "model_type": "qwen2",
    },
    "mistral-7b": {
        **_llama(4096, 32, 14336, 32, 8, vocab_size=32768),
        "model_type": "mistral",
        "sliding_window": None,
    },
    "gemma-2-2b": {**_llama(2304, 26, 9216, 8, 4, tie_word_embeddings=True), **_GEMMA2},
    "gemma-2-9b": {
        **_llama(3584, 42, 14336, 16, 8, tie_word_embeddings=True),
        **_GEMMA2,
    },
    "gpt-oss-20b": {
        **_llama(2880, 24, 2880, 64, 8, vocab_size=201088),
        "model_type": "gpt_oss",
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
    },
    "t5-large": {
        **{"model_type": "t5", "d_model": 1024, "d_ff": 4096, "num_layers": 24},
        **{"num_decoder_layers": 24, "num_heads": 16, "d_kv": 64, "vocab_size": 32128},
        "decoder_start_token_id": 0,
    },
    "vit-huge": {
        **{"model_type": "vit", "hidden_size": 1280, "num_hidden_layers": 32},
        **{"intermediate_size": 5120, "num_attention_heads": 16, "patch_size": 14},
        **{"image_size": 224, "num_labels": 1000},
    },
    "whisper-large-v3": {
        **{"model_type": "whisper", "d_model": 1280, "num_mel_bins": 128},
        **{"vocab_size": 51866, "encoder_layers": 32, "decoder_layers": 32},
        **{"encoder_attention_heads": 20, "decoder_attention_heads": 20},
        **{"encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120},
    },
}
