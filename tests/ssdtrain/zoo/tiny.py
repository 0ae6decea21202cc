"""Tiny configurations of every model type of transformers, by the names of fields.

A configuration is rebuilt from its class's fields with smaller numbers: `WIDTH`
features, two layers or one of each kind, a vocabulary of `VOCABULARY` with the special
tokens at its end, images of `IMAGE` pixels. What no rule of names can know stands in
`CHANGES`.
"""

import re
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig, ResNetConfig

WIDTH, HEADS, HEAD, LAYERS = 64, 4, 16, 2
VOCABULARY, POSITIONS, IMAGE, PATCH = 128, 128, 32, 8
SPECIAL = 32
"""Tokens at the end of the vocabulary for special ones."""


def at_most(limit: int) -> Callable[[int], int]:
    return lambda value: min(value, limit)


RULES: list[tuple[re.Pattern[str], Callable[[int], int]]] = [
    (re.compile(pattern), change)
    for pattern, change in (
        # As they are.
        (r"num_groups$|codevector_groups|_groups$", at_most(4)),
        (
            r"(^|_)(kernel|kernel_size|stride|dilation|padding|ratio|factor|rate|expand|"
            r"coefficient|cost|levels?|ngram|mult|norm|chunk_size_\w+|seed|scale|stages|"
            r"encoder_blocks|size_divisor)$",
            at_most(32),
        ),
        (r"^stage_|stem_channels|num_pos_feats", lambda v: v),
        (r"chunk_\w+_context|focal_window", at_most(3)),
        (r"mask_time_length|mask_feature_length", at_most(2)),
        (r"rotary_dim|rope_head_dim", at_most(HEAD)),
        (r"temperature|rope|theta|base$|loss|ignore|eps|timescale|_freq$", lambda v: v),
        (
            r"relative_attention_num_buckets|_bins$|(^|_)num_buckets|position_buckets",
            at_most(32),
        ),
        # Numbers of things.
        (r"(key_value|kv)_(attention_)?(heads|groups)|kv_head", at_most(2)),
        (r"heads?_?$|heads$|n_head|num_head|_heads_|nhead", at_most(HEADS)),
        (
            r"(^|_)(layers?|depth|blocks?|n_layer|num_layer|loops|"
            r"self_attends_per_block|repeats)$",
            at_most(LAYERS),
        ),
        (
            r"pattern$|interval$|period$|every_n_layers|_sparse_step$|frequency$",
            at_most(2),
        ),
        (
            r"experts_per_tok|topk_group|top_?k$|moe_k$|num_selects|index_topk",
            at_most(2),
        ),
        (r"n_group$", at_most(2)),
        (r"shared_experts", at_most(1)),
        (r"expert_capacity", at_most(8)),
        (r"experts?$|num_moe_experts|expert_num", at_most(4)),
        (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", at_most(1)),
        (
            r"queries|query_tokens|proposals|detection_tokens|num_denoising|latents|"
            r"latent_query_num|landmarks",
            at_most(8),
        ),
        (r"codebooks|quantizers|num_code_groups", at_most(3)),
        (
            r"codebook_size|codebook_vocab|num_embeddings|num_embeds|centroids|clusters|"
            r"codevectors",
            at_most(VOCABULARY),
        ),
        (
            r"n_mels$|mel_bins|num_mels|feature_size|spectrogram_bins|mel_dim|"
            r"input_feat_per_channel|n_mel_channels|num_filter_bank",
            at_most(16),
        ),
        # Extents.
        (r"entity_vocab|(^|_)vocab(ulary)?(_size\w*)?$", at_most(VOCABULARY)),
        (
            r"position_embeddings|positions|max_pos|n_ctx|max_len|seq_len|max_source|"
            r"max_target|context_length|mem_len|max_text|max_seq|n_positions|max_relative|"
            r"max_distance|2d_position",
            at_most(POSITIONS),
        ),
        (
            r"image_size|img_size|resolution|input_size|crop_size|spec_size|tile_size",
            at_most(IMAGE),
        ),
        (
            r"patch_size|patch_length|patch_stride|encoder_stride|output_stride",
            at_most(PATCH),
        ),
        (r"frames|tubelet|temporal_patch", at_most(4)),
        (r"sliding|attention_window|local_attention|window_length", at_most(8)),
        (r"num_windows", at_most(4)),
        (r"window", lambda value: 2 if value <= 64 else 4 * PATCH),
        (r"chunk_(size|len|length)|block_size", at_most(8)),
        (r"image_seq_length|image_tokens|tokens_per_image|num_patches", at_most(16)),
        (r"prompt_length|context_size|label_length|segment_means", at_most(8)),
        # Widths.
        (
            r"head_dim|d_kv|d_head|dim_head|attention_head_size|lora_rank|kv_channels|"
            r"dims_per_head",
            at_most(HEAD),
        ),
        (r"state_size|d_state|state_dim|ssm_state", at_most(8)),
        (r"num_channels|in_channels|in_chans|input_channels|channels_in", at_most(16)),
        (
            r"intermediate|ffn|mlp_dim|d_ff|feed_?forward|dim_ff|ff_dim|inner",
            at_most(2 * WIDTH),
        ),
        (r"freq|sampl|max|min|size_factor|points|hop_length", at_most(64)),
        (r"", at_most(WIDTH)),
    )
]
TOKEN = re.compile(
    r"(token|pad|bos|eos|start|end|sep|cls|mask|unk|newline|patch|eod|boi|eoi|boa|eoa)"
    r"_(id|ids|index)$|token_id|_token$"
)
WIDTHS = re.compile(r"hidden_sizes|dims?$|channels|embed_dims|widths|sizes$|conv_dim")
HEAD_LISTS = re.compile(r"head")
LAYER_LISTS = re.compile(
    r"depths|(?<!proj_)layers$|num_blocks|layer_nums|layers_per|blocks_per_stage"
)


class Shrinker:
    """One model's configuration, with those inside it; tokens are one numbering."""

    def __init__(self, changes: dict[str, Any]) -> None:
        self._changes = changes
        """By field, in all parts, or by `part.field`."""
        self._tokens: dict[int, int] = {}

    def tiny(self, kind: type[PreTrainedConfig], part: str = "") -> dict[str, Any]:
        """Arguments for a small configuration of this class."""
        whole = kind()
        found: dict[str, Any] = {}
        for field in fields(kind):
            name = field.name
            changed = self._changes.get(name, MISSING)
            value = self._changes.get(f"{part}.{name}", changed)
            if value is MISSING:
                value = self._value(kind, whole, field, part)
            if value is not MISSING:
                found[name] = value
        self._settle_heads(whole, found)
        self._settle_layers(whole, found)
        self._settle_stages(whole, found)
        return found

    @staticmethod
    def _settle_stages(whole: Any, found: dict[str, Any]) -> None:
        """As many results of a backbone as before."""
        wanted = list(getattr(whole, "out_features", None) or ())
        if len(wanted) < 2 or "out_features" in found:
            return
        if isinstance(found.get("num_hidden_layers"), int) and "depths" not in found:
            found["num_hidden_layers"] = max(LAYERS, len(wanted))
            wanted = [f"stage{at + 1}" for at in range(len(wanted))]
        found["out_features"] = wanted

    @staticmethod
    def _settle_heads(whole: Any, found: dict[str, Any]) -> None:
        """As many heads of keys as of queries where that is the default."""
        for keys, queries in (
            ("num_key_value_heads", "num_attention_heads"),
            ("num_kv_heads", "num_attention_heads"),
        ):
            if isinstance(found.get(keys), int) and isinstance(found.get(queries), int):
                own = type(whole).default_config_fields()
                if own.get(keys) == own.get(queries):
                    found[keys] = found[queries]

    def _settle_layers(self, whole: Any, found: dict[str, Any]) -> None:
        """One layer of each kind."""
        own = {key.rpartition(".")[2] for key in self._changes}
        count = next((n for n in COUNTS if isinstance(found.get(n), int)), None)
        if count is None or count in own:
            return
        number = type(whole).default_config_fields().get(count)
        lists = {
            name: list(value)
            for name in found
            if name in whole.__dict__
            and name not in own
            and isinstance(value := whole.__dict__[name], list | tuple)
            and len(value) == number
            and number > LAYERS
            and all(isinstance(one, str | int | bool) for one in value)
        }
        if not any(isinstance(v[0], str) for v in lists.values()):
            return
        seen: dict[Any, int] = {}
        for at, kinds in enumerate(zip(*lists.values(), strict=True)):
            seen.setdefault(kinds, at)
        chosen = sorted(seen.values())[:4]
        if len(chosen) < LAYERS:
            chosen = list(range(LAYERS))
        found[count] = len(chosen)
        for name, value in lists.items():
            found[name] = [value[at] for at in chosen]

    def _value(self, kind: Any, whole: Any, field: "Field[Any]", part: str) -> Any:
        name = field.name
        inside = getattr(whole, name, None) if name in kind.sub_configs else None
        if (
            name == "backbone_config"
            and getattr(inside, "model_type", "") == "timm_backbone"
        ):
            return ResNetConfig(**RESNET)
        if isinstance(inside, PreTrainedConfig):
            found = self.tiny(type(inside), f"{part}.{name}".strip("."))
            return type(inside)(**found)
        default = field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        if default is MISSING:
            return MISSING
        if default is None and name in FOR_NONE and "vision" not in part:
            return FOR_NONE[name]
        if name == "rope_parameters":
            table = getattr(whole, name, None) or {}
            known = getattr(kind, "ignore_keys_at_rope_validation", None) or ()
            if any(isinstance(one, dict) for one in table.values()):
                return table  # by kind of layer
            if "mrope_section" in table or "mrope_section" in known:
                base = {"rope_type": "default", "rope_theta": 1e4}
                return self._sections({**base, **table})
        if name == "id2label" or name == "label2id":
            return MISSING
        return self.small(name, default)

    def small(self, name: str, value: Any) -> Any:
        """The value, smaller; lists and tables by their members."""
        if isinstance(value, bool) or value is None or isinstance(value, str):
            return value
        if TOKEN.search(name) and not isinstance(value, float):
            return self._token(value)
        if isinstance(value, int):
            return self._number(name, value)
        if isinstance(value, dict):
            return {key: self._in_table(key, one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._list(name, list(value)))
        return value

    @staticmethod
    def _sections(table: dict[str, Any]) -> dict[str, Any]:
        """Of rotary frequencies: time, height and width share those of one head."""
        number = int(HEAD * table.get("partial_rotary_factor", 1.0)) // 2
        parts = [number - 2 * (number // 3), number // 3, number // 3]
        return {**table, "mrope_section": parts}

    def _in_table(self, key: Any, value: Any) -> Any:
        if isinstance(value, dict):
            return {inner: self._in_table(inner, one) for inner, one in value.items()}
        if key == "original_max_position_embeddings":
            return POSITIONS // 2
        return value

    def _token(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(self._token, value))
        if not isinstance(value, int) or value < VOCABULARY - SPECIAL:
            return value
        return self._tokens.setdefault(value, VOCABULARY - 1 - len(self._tokens))

    def _number(self, name: str, value: int) -> int:
        if value <= 1:
            return value
        for pattern, change in RULES:
            if pattern.search(name):
                return change(value)
        return value

    def _list(self, name: str, values: list[Any]) -> list[Any]:
        if not values or not all(type(one) is int for one in values):
            if values and all(isinstance(one, list | tuple) for one in values):
                return [type(one)(self._list(name, list(one))) for one in values]
            return values
        if LAYER_LISTS.search(name):
            return [min(one, 1) for one in values]
        if HEAD_LISTS.search(name):
            least = max(1, min(values))
            return [min(16, max(1, 2 * one // least)) for one in values]
        if WIDTHS.search(name):
            least = min((one for one in values if one > 4), default=1)
            return [
                one if one <= 4 else min(256, max(8, 32 * one // least // 8 * 8))
                for one in values
            ]
        return [self._number(name, one) for one in values]


COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers")
RESNET = {
    "embedding_size": 16,
    "hidden_sizes": [16, 16, 32, 32],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
    "out_features": ["stage2", "stage3", "stage4"],
}
FOR_NONE: dict[str, Any] = {
    "head_dim": HEAD,
    "num_key_value_heads": HEADS,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "num_experts": 4,
    "vocab_size": VOCABULARY,
    "prediction_length": 8,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "top_k_experts": 2,
}
"""What classes need and have no default for."""
VIT = {
    "model_type": "dinov2",
    "hidden_size": WIDTH,
    "num_hidden_layers": 4,
    "num_attention_heads": HEADS,
    "image_size": IMAGE,
    "patch_size": PATCH,
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
    "reshape_hidden_states": False,
}
WIDE = {"image_size": 2 * IMAGE}
EFFICIENT = {"width_coefficient": 0.1, "depth_coefficient": 0.1, "hidden_dim": 128}
QUESTIONS = {"image_token_index": VOCABULARY - 1}
TIMES = {"num_time_features": 2}
CHANGES: dict[str, dict[str, Any]] = {
    "align": {
        **{f"vision_config.{name}": value for name, value in EFFICIENT.items()},
        "projection_dim": 128,
    },
    "autoformer": TIMES,
    "bamba": {"attn_layer_indices": [1]},
    "blip-2": QUESTIONS,
    "bros": {"hidden_size": 128, "dim_bbox": 8},
    "cvt": {"depth": [1, 2, 3]},
    "depth_anything": {"backbone_config": VIT},
    "donut-swin": WIDE,
    "efficientnet": EFFICIENT,
    "esm": {"pad_token_id": 1, "mask_token_id": 2},
    "gemma3n": {"text_config.num_kv_shared_layers": 0},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "glm5_next": {"index_kpool": 2},
    "glm5_next_text": {"index_kpool": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "grounding-dino": {"num_queries": 4},
    "informer": TIMES,
    "instructblip": QUESTIONS,
    "jamba": {"attn_layer_offset": 1, "expert_layer_offset": 1},
    "layoutlmv3": {"coordinate_size": 12, "shape_size": 8},
    "levit": WIDE,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lilt": {"hidden_size": 96},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "markuplm": {
        "max_xpath_tag_unit_embeddings": 256,
        "max_xpath_subs_unit_embeddings": 1024,
    },
    "mask2former": {"feature_size": WIDTH, "mask_feature_size": WIDTH},
    "maskformer": {"fpn_feature_size": WIDTH, "mask_feature_size": WIDTH},
    "maskformer-swin": WIDE,
    "mm-grounding-dino": {"num_queries": 4},
    "mobilevitv2": WIDE,
    "nystromformer": {"segment_means_seq_len": 16, "num_landmarks": 8},
    "poolformer": WIDE,
    "prompt_depth_anything": {"backbone_config": VIT},
    "pvt": WIDE,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {
        "is_decoder": True,
        "axial_pos_shape": (4, 4),
        "axial_pos_embds_dim": (16, 48),
    },
    "sam": {"vision_config.num_pos_feats": WIDTH // 2},
    "sam_hq": {"vision_config.num_pos_feats": WIDTH // 2},
    "superpoint": {"keypoint_decoder_dim": 65},
    "swin": WIDE,
    "swinv2": WIDE,
    "time_series_transformer": TIMES,
    "zamba": {"num_hidden_layers": 3, "attn_layer_period": 2, "attn_layer_offset": 1},
}
"""By model type."""


def tiny_config(model_type: str) -> Any:
    """A small configuration of a model type of transformers."""
    kind = CONFIG_MAPPING[model_type]
    return kind(**Shrinker(CHANGES.get(model_type, {})).tiny(kind))
