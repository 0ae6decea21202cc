"""Inputs of a model, by the names that its forward takes.

`feeds(model)` gives a few sets of them, the fullest first: a model runs with the first one
that it takes. A model that says how many places its images take among the tokens is given
as many.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

BATCH, LENGTH = 2, 16
FEW = 5
"""Tokens that no model reads as special ones start here."""
MANY = 96
"""And end here."""


class Feeder:
    """Makes tensors for one model."""

    def __init__(self, model: Any) -> None:
        self.model, self.config = model, model.config
        self._configs = list(configs_in(self.config))
        self.taken = {
            name: value
            for name, value in inspect.signature(model.forward).parameters.items()
            if value.kind not in (value.VAR_KEYWORD, value.VAR_POSITIONAL)
        }
        self.other = False
        """Whether images are frames, and sounds (batch, time, features) or of one
        channel."""
        self.num_places = 0
        """Tokens of a row that stand for parts of an image or a sound."""

    def of(self, *names: str, default: Any = None) -> Any:
        """The first of these fields that any configuration has."""
        for name in names:
            for config in self._configs:
                found = getattr(config, name, None)
                if found is not None:
                    return found
        return default

    def inputs(self, names: list[str]) -> dict[str, Any]:
        found = {}
        for name in names:
            if name in MAKERS:
                found[name] = MAKERS[name](self)
        return found

    # -- what makers ask for ------------------------------------------------------------

    def tokens(self, length: int = LENGTH, vocabulary: int | None = None) -> Tensor:
        most = min(MANY, vocabulary or self.of("vocab_size", default=MANY))
        return torch.randint(min(FEW, most - 1), most, (BATCH, length))

    def with_places(self) -> Tensor:
        """Tokens, of which some stand for parts of an image."""
        extra = (self.num_places + 7) // 8 * 8
        found = self.tokens(LENGTH + extra)
        mark = self.of(*PLACES)
        if self.num_places and mark is not None:
            found[:, 1 : 1 + self.num_places] = mark
        return found

    def image(self) -> tuple[int, int]:
        size = self.of("image_size", "img_size", "input_size", "resolution", default=32)
        if isinstance(size, dict):
            size = (size.get("height", 32), size.get("width", 32))
        return (size, size) if isinstance(size, int) else tuple(size)[-2:]

    def channels(self) -> int:
        return int(self.of("num_channels", "in_channels", "in_chans", "num_input_channels", default=3))  # noqa: E501

    def floats(self, *shape: int) -> Tensor:
        return torch.randn(*shape)

    def pixels(self, *leading: int) -> Tensor:
        return self.floats(*(leading or (BATCH,)), self.channels(), *self.image())

    def patches(self) -> Tensor:
        """Of images cut to pieces, of 4 by 4 each."""
        patch = self.of("patch_size", default=8)
        patch = patch if isinstance(patch, int) else patch[-1]
        temporal = self.of(
            "temporal_patch_size", "video_temporal_patch_size", default=1
        )
        temporal = temporal if isinstance(temporal, int) else temporal[0]
        if self.other:
            return self.floats(BATCH * 16, self.channels(), patch, patch)
        width = self.channels() * temporal * patch * patch
        return self.floats(BATCH * 16, width)

    def grid(self) -> Tensor:
        return torch.tensor([[1, 4, 4]] * BATCH)


PLACES = ("image_token_id", "image_token_index", "audio_token_id", "audio_token_index")
PLACES += ("video_token_id", "media_token_id", "im_patch_id", "image_patch_id")
PLACES += ("media_placeholder_token_id", "mm_token_id", "audio_placeholder_token_id")

Maker = Callable[[Feeder], Any]


def ones_like(name: str) -> Maker:
    return lambda feeder: torch.ones_like(MAKERS[name](feeder))


def _pixel_values(feeder: Feeder) -> Tensor:
    taken = feeder.taken
    if "image_grid_thw" in taken or "grid_thw" in taken:
        return feeder.patches()
    if "spatial_shapes" in taken:
        patch = feeder.of("patch_size")
        return feeder.floats(BATCH, 16, feeder.channels() * patch * patch)
    if feeder.other:
        return feeder.pixels(BATCH, feeder.of("num_frames", default=2))
    return feeder.pixels()


def _mel_frames(feeder: Feeder) -> Tensor:
    bins = feeder.of("num_mel_bins", "n_mels", "feature_size", "input_feat_per_channel",
                     "num_mels", "input_dim", "mel_bins", "feature_projection_input_dim", default=16)  # noqa: E501
    positions = feeder.of("max_source_positions", default=None)
    frames = 2 * positions if positions else 64
    if feeder.other:
        return feeder.floats(BATCH, frames, bins)
    return feeder.floats(BATCH, bins, frames)


def _values(feeder: Feeder) -> Tensor:
    if feeder.other:
        return feeder.floats(BATCH, 1, 1600)
    return feeder.floats(BATCH, 1600)


def _decoder_tokens(feeder: Feeder) -> Tensor:
    return feeder.tokens(8)


MAKERS: dict[str, Maker] = {
    "input_ids": Feeder.with_places,
    "attention_mask": lambda f: torch.ones(BATCH, LENGTH + (f.num_places + 7) // 8 * 8, dtype=torch.long),
    "decoder_input_ids": _decoder_tokens,
    "pixel_values": _pixel_values,
    "pixel_values_videos": lambda f: f.pixels(BATCH, f.of("num_frames", "frames_per_clip", default=4)),
    "image_grid_thw": Feeder.grid,
    "grid_thw": Feeder.grid,
    "image_sizes": lambda f: torch.tensor([f.image()] * BATCH),
    "spatial_shapes": lambda f: torch.tensor([[4, 4]] * BATCH),
    "pixel_attention_mask": lambda f: torch.ones(BATCH, 16, dtype=torch.long),
    "input_features_mask": lambda f: torch.ones(BATCH, _mel_frames(f).shape[1 if f.other else 2], dtype=torch.long),
    "feature_attention_mask": lambda f: torch.ones(BATCH, _mel_frames(f).shape[1 if f.other else 2], dtype=torch.long),
    "input_features": _mel_frames,
    "qformer_input_ids": lambda f: f.tokens(8),
    "qformer_attention_mask": lambda f: torch.ones(BATCH, 8, dtype=torch.long),
    "task_inputs": lambda f: f.tokens(f.of("task_seq_len", default=8)),
    "visual_feats": lambda f: f.floats(BATCH, 4, f.of("visual_feat_dim", default=16)),
    "visual_pos": lambda f: torch.rand(BATCH, 4, 4),
    "query_embeds": lambda f: f.floats(BATCH, 4, f.of("hidden_size", default=64)),
    "prompt_pixel_values": Feeder.pixels,
    "prompt_masks": Feeder.pixels,
    "merge_sizes": lambda f: torch.tensor([1] * BATCH),
    "inputs_embeds": lambda f: f.floats(BATCH, LENGTH, f.of("hidden_size", default=64)),
    "latents": lambda f: f.floats(BATCH, f.of("hidden_size", default=64), 16),
    "input_values": _values,
    "hidden_states": Feeder.patches,
    "past_values": lambda f: f.floats(BATCH, f.of("context_length", "seq_length", "sequence_length", default=32), f.of("num_input_channels", default=1)),
    "bbox": lambda f: torch.zeros(BATCH, LENGTH, 4, dtype=torch.long),
}
def configs_in(config: Any) -> Iterator[Any]:
    """This configuration and all inside, the parts of images first."""
    parts = [
        getattr(config, name, None)
        for name in ("vision_config", "audio_config", *config.sub_configs)
    ]
    yield config
    for part in dict.fromkeys(id(p) for p in parts if p is not None):
        found = next(p for p in parts if id(p) == part)
        if hasattr(found, "sub_configs"):
            yield from configs_in(found)


MATCH = re.compile(r"tokens: (\d+), .*?features:? (\d+)", re.DOTALL)


def feeds(model: Any) -> Iterator[dict[str, Any]]:
    """Sets of inputs to try."""
    feeder = Feeder(model)
    taken = feeder.taken
    main = model.main_input_name
    wanted = [name for name, one in taken.items() if one.default is one.empty]
    wanted += [main] if isinstance(main, str) and main in taken else []
    media = [n for n in MEDIA if n in taken]
    beside = [n for n in BESIDE if n in taken]
    text = [n for n in TEXT if n in taken]
    sets = []
    if "input_ids" in taken:
        sets += [[*text, *media[:1], *beside], [*text, *media[:1]], [*text, *media]]
        sets += [text]
    optional = "visual_feats", "visual_pos"
    sets += [[*text, *(n for n in optional if n in taken)]]
    sets += [[], beside, [*media, *beside], [n for n in taken if n in MAKERS and n != "inputs_embeds"]]
    done = []
    for names in sets:
        names = list(dict.fromkeys([*wanted, *names]))
        if names in done:
            continue
        done.append(names)
        for feeder.other in (False, True) if set(names) & {*MEDIA} else (False,):
            if "input_ids" in names and feeder.of(*PLACES) is not None:
                yield from placed(feeder, names)
            yield feeder.inputs(names)


MEDIA = ("pixel_values", "input_features", "input_values", "pixel_values_videos")
BESIDE = ("image_grid_thw", "spatial_shapes", "image_sizes", "pixel_attention_mask",
          "input_features_mask", "feature_attention_mask")
TEXT = ("input_ids", "attention_mask", "bbox", "decoder_input_ids")


def placed(feeder: Feeder, names: list[str]) -> Iterator[dict[str, Any]]:
    """With as many tokens for parts of images as the model asks for."""
    feeder.num_places = 4
    inputs = feeder.inputs(names)
    try:
        feeder.model(**inputs)
    except Exception as error:
        found = MATCH.search(str(error))
        if found is None:
            feeder.num_places = 0
            return
        have, need = map(int, found.groups())
        feeder.num_places = max(1, need * 4 * BATCH // max(1, have) // BATCH)
        yield feeder.inputs(names)
        feeder.num_places = 0
        return
    yield inputs
    feeder.num_places = 0
