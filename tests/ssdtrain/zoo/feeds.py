"""Inputs of a model of transformers, by the names that its forward takes.

`feeds(model)` gives sets of them, the fullest first: a model is trained with the first
one that it takes. One that says how many places its images take among the tokens is
given as many.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

BATCH, LENGTH = 2, 16
SIDE = 4
"""Patches of an image, each way."""
FEW, MANY = 5, 96
"""Tokens between these are nothing special to any model."""
FIRST_PLACES = 4
"""Tokens of a row that stand for an image at first."""
TEXT = ("input_ids", "attention_mask", "bbox", "decoder_input_ids")
MEDIA = ("pixel_values", "input_features", "input_values", "pixel_values_videos")
BESIDE = ("image_grid_thw", "spatial_shapes", "image_sizes", "pixel_attention_mask")
BESIDE += ("input_features_mask", "feature_attention_mask")
"""What says how media lie."""
OBJECTS = ("visual_feats", "visual_pos")
PLACES = ("image_token_id", "image_token_index", "audio_token_id", "audio_token_index")
PLACES += ("video_token_id", "media_token_id", "im_patch_id", "image_patch_id")
PLACES += ("media_placeholder_token_id", "mm_token_id", "audio_placeholder_token_id")
CHANNELS = ("num_channels", "in_channels", "in_chans", "num_input_channels")
BINS = ("num_mel_bins", "n_mels", "feature_size", "input_feat_per_channel", "num_mels")
BINS += ("input_dim", "mel_bins", "feature_projection_input_dim")
MISMATCH = re.compile(r"tokens: (\d+), .*?features:? (\d+)", re.DOTALL)
"""What models say if tokens and images do not go together."""


class Feeder:
    """Makes tensors for one model."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._configs = list(configs_in(model.config))
        self.taken = {
            name: value
            for name, value in inspect.signature(model.forward).parameters.items()
            if value.kind not in (value.VAR_KEYWORD, value.VAR_POSITIONAL)
        }
        self.other = False
        """Whether images are frames or patches, and sounds of one channel or (batch,
        time, features)."""
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
        """Those of the names that can be made."""
        return {name: MAKERS[name](self) for name in names if name in MAKERS}

    @property
    def length(self) -> int:
        """Tokens of a row: a multiple of 8, for attention in blocks."""
        return LENGTH + (self.num_places + 7) // 8 * 8

    def tokens(self, length: int) -> Tensor:
        most = min(MANY, self.of("vocab_size", default=MANY))
        return torch.randint(min(FEW, most - 1), most, (BATCH, length))

    def text(self) -> Tensor:
        """Tokens, of which some stand for parts of an image."""
        found = self.tokens(self.length)
        mark = self.of(*PLACES)
        if self.num_places and mark is not None:
            found[:, 1 : 1 + self.num_places] = mark
        return found

    def size(self) -> tuple[int, int]:
        """Height and width of an image."""
        size = self.of("image_size", "img_size", "input_size", "resolution", default=32)
        if isinstance(size, dict):
            size = size.get("height", 32), size.get("width", 32)
        return (size, size) if isinstance(size, int) else tuple(size)[-2:]

    def pixels(self, *leading: int) -> Tensor:
        channels = self.of(*CHANNELS, default=3)
        return torch.randn(*leading, channels, *self.size())

    def film(self) -> Tensor:
        number = self.of("num_frames", "frames_per_clip", default=2)
        return self.pixels(BATCH, number)

    def patches(self) -> Tensor:
        """Of images that are cut, one after the other."""
        patch = _last(self.of("patch_size", default=8))
        names = "temporal_patch_size", "video_temporal_patch_size"
        frames = _last(self.of(*names, default=1))
        channels = self.of(*CHANNELS, default=3)
        number = BATCH * SIDE * SIDE
        if self.other:
            return torch.randn(number, channels, patch, patch)
        return torch.randn(number, channels * frames * patch * patch)

    def images(self) -> Tensor:
        """As this model wants them."""
        if "image_grid_thw" in self.taken or "grid_thw" in self.taken:
            return self.patches()
        if "spatial_shapes" in self.taken:
            patch, channels = self.of("patch_size"), self.of(*CHANNELS, default=3)
            return torch.randn(BATCH, SIDE * SIDE, channels * patch * patch)
        return self.film() if self.other else self.pixels(BATCH)

    def sounds(self) -> Tensor:
        """Spectrograms."""
        bins, positions = self.of(*BINS, default=16), self.of("max_source_positions")
        frames = 2 * positions if positions else 64
        shape = (frames, bins) if self.other else (bins, frames)
        return torch.randn(BATCH, *shape)

    def sounds_mask(self) -> Tensor:
        return _ones(self.sounds().shape[1 if self.other else 2])

    def waves(self) -> Tensor:
        return torch.randn(BATCH, 1, 1600) if self.other else torch.randn(BATCH, 1600)

    def features(self, *shape: int) -> Tensor:
        """Of the model's width."""
        return torch.randn(BATCH, *shape, self.of("hidden_size", default=64))

    def series(self) -> Tensor:
        names = "context_length", "seq_length", "sequence_length"
        channels = self.of("num_input_channels", default=1)
        return torch.randn(BATCH, self.of(*names, default=32), channels)


def _last(value: Any) -> int:
    return value if isinstance(value, int) else int(value[-1])


def _ones(length: int) -> Tensor:
    return torch.ones(BATCH, length, dtype=torch.long)


def _rows(*values: int) -> Tensor:
    return torch.tensor([values] * BATCH)


MAKERS: dict[str, Callable[[Feeder], Any]] = {
    "input_ids": Feeder.text,
    "attention_mask": lambda f: _ones(f.length),
    "bbox": lambda f: torch.zeros(BATCH, LENGTH, 4, dtype=torch.long),
    "decoder_input_ids": lambda f: f.tokens(8),
    "inputs_embeds": lambda f: f.features(LENGTH),
    "qformer_input_ids": lambda f: f.tokens(8),
    "qformer_attention_mask": lambda f: _ones(8),
    "task_inputs": lambda f: f.tokens(f.of("task_seq_len", default=8)),
    "pixel_values": Feeder.images,
    "pixel_values_videos": Feeder.film,
    "image_grid_thw": lambda f: _rows(1, SIDE, SIDE),
    "grid_thw": lambda f: _rows(1, SIDE, SIDE),
    "image_sizes": lambda f: _rows(*f.size()),
    "spatial_shapes": lambda f: _rows(SIDE, SIDE),
    "pixel_attention_mask": lambda f: _ones(SIDE * SIDE),
    "merge_sizes": lambda f: torch.ones(BATCH, dtype=torch.long),
    "prompt_pixel_values": lambda f: f.pixels(BATCH),
    "prompt_masks": lambda f: f.pixels(BATCH),
    "hidden_states": Feeder.patches,
    "query_embeds": lambda f: f.features(4),
    "visual_feats": lambda f: torch.randn(BATCH, 4, f.of("visual_feat_dim")),
    "visual_pos": lambda f: torch.rand(BATCH, 4, 4),
    "input_features": Feeder.sounds,
    "input_features_mask": Feeder.sounds_mask,
    "feature_attention_mask": Feeder.sounds_mask,
    "input_values": Feeder.waves,
    "latents": lambda f: f.features(16).transpose(1, 2),
    "past_values": Feeder.series,
}


def configs_in(config: Any) -> Iterator[Any]:
    """This configuration and all inside, those of images and sounds first."""
    yield config
    names = ("vision_config", "audio_config", *config.sub_configs)
    parts = {id(part): part for part in (getattr(config, n, None) for n in names)}
    for part in parts.values():
        if hasattr(part, "sub_configs"):
            yield from configs_in(part)


def feeds(model: Any) -> Iterator[dict[str, Any]]:
    """Sets of inputs to try."""
    feeder = Feeder(model)
    for names in _names(feeder, model.main_input_name):
        for feeder.other in (False, True) if {*names} & {*MEDIA} else (False,):
            if "input_ids" in names and feeder.of(*PLACES) is not None:
                yield from _placed(feeder, names)
            yield feeder.inputs(names)


def _names(feeder: Feeder, main: Any) -> list[list[str]]:
    """Names of the inputs of each set."""
    taken = feeder.taken
    wanted = [name for name, one in taken.items() if one.default is one.empty]
    wanted += [main] if isinstance(main, str) and main in taken else []
    text, media, beside, objects = (
        [name for name in names if name in taken]
        for names in (TEXT, MEDIA, BESIDE, OBJECTS)
    )
    sets = [[], beside, [*media, *beside]]
    if "input_ids" in taken:
        first = media[:1]
        sets[:0] = [[*text, *first, *beside], [*text, *first], [*text, *media], text]
        sets[4:4] = [[*text, *objects]]
    sets.append([name for name in taken if name in MAKERS and name != "inputs_embeds"])
    found = [list(dict.fromkeys([*wanted, *names])) for names in sets]
    return [names for at, names in enumerate(found) if names not in found[:at]]


def _placed(feeder: Feeder, names: list[str]) -> Iterator[dict[str, Any]]:
    """With as many tokens for parts of images as the model asks for."""
    feeder.num_places = FIRST_PLACES
    inputs = feeder.inputs(names)
    try:
        feeder.model(**inputs)
    except Exception as error:  # of any kind: the text says what is wrong
        found = MISMATCH.search(str(error))
        if found is not None:
            have, need = map(int, found.groups())
            feeder.num_places = max(1, need * FIRST_PLACES // max(1, have))
            yield feeder.inputs(names)
    else:
        yield inputs
    feeder.num_places = 0
