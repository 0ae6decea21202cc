"""Backbones of diffusers: a tiny one of every class of models that is trained."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any

import diffusers
import torch
from diffusers import models
from torch import Tensor

from tests.ssdtrain.zoo.judge import Maker
from tests.ssdtrain.zoo.of_transformers import Unfit, copies, first_of
from tests.ssdtrain.zoo.tiny import HEAD, HEADS, WIDTH, Shrinker

BATCH, SIDE, WORDS, FRAMES = 2, 8, 8, 2
MOST_PARAMETERS = 8_000_000
CHANGES: dict[str, dict[str, Any]] = {
    "AutoencoderTiny": {
        "encoder_block_out_channels": (16, 16),
        "decoder_block_out_channels": (16, 16),
        "num_encoder_blocks": (1, 1),
        "num_decoder_blocks": (1, 1),
    },
    "UNet2DModel": {"sample_size": 16, "norm_num_groups": 4},
}
"""Arguments of classes, beside those by the rules of names."""
TEXT = ("joint_attention_dim", "cross_attention_dim", "caption_channels", "text_dim")
TEXT += ("text_embed_dim", "text_states_dim", "caption_projection_dim", "context_dim")
TEXT += ("encoder_hid_dim", "cap_feat_dim", "text_embed_dim", "embedding_dim")


def kinds() -> dict[str, type[Any]]:
    """Classes of models by name."""
    found: dict[str, type[Any]] = {}
    for module in pkgutil.walk_packages(models.__path__, "diffusers.models."):
        try:
            inside = importlib.import_module(module.name)
        except Exception:  # of a kernel or a library that is not there
            continue
        for name, kind in vars(inside).items():
            if (
                inspect.isclass(kind)
                and issubclass(kind, diffusers.ModelMixin)
                and kind.__module__ == module.name
                and "forward" in vars(kind)
            ):
                found[name] = kind
    return found


def names() -> list[str]:
    """Of all classes."""
    return sorted(kinds())


def tiny(kind: type[Any]) -> dict[str, Any]:
    """Arguments for a small model."""
    changes = CHANGES.get(kind.__name__, {})
    shrinker = Shrinker({})
    found = {}
    for name, one in list(inspect.signature(kind.__init__).parameters.items())[1:]:
        if name in changes:
            found[name] = changes[name]
        elif one.default is not one.empty:
            found[name] = shrinker.small(name, one.default)
    heads = found.get("num_attention_heads")
    for name in ("axes_dims_rope", "axes_dim", "rope_axes_dim", "rope_dim_list"):
        if name in found and isinstance(found[name], list | tuple):
            found[name] = (HEAD // 4, HEAD // 4, HEAD // 2)[-len(found[name]) :]
    if heads is not None and "attention_head_dim" in found:
        found["num_attention_heads"] = HEADS
    return found


class Feeder:
    """Inputs for one model, of images, films or rows of features."""

    def __init__(self, model: Any) -> None:
        self.config = dict(model.config)
        self.taken = list(inspect.signature(model.forward).parameters.values())

    def of(self, *names: str, default: int) -> int:
        for name in names:
            found = self.config.get(name)
            if isinstance(found, int) and not isinstance(found, bool):
                return found
            if isinstance(found, list | tuple) and found and isinstance(found[0], int):
                return int(found[0])
        return default

    def sets(self) -> Iterator[dict[str, Any]]:
        """What to try: results of a forward that are differentiable end it."""
        channels = self.of("in_channels", "latent_channels", default=4)
        width = self.of(*TEXT, default=WIDTH)
        side = self.of("sample_size", default=SIDE)
        shapes = {
            "image": (BATCH, channels, side, side),
            "rows": (BATCH, SIDE * SIDE, channels),
            "film": (BATCH, channels, FRAMES, side, side),
            "frames": (BATCH, FRAMES, channels, side, side),
            "sound": (BATCH, channels, 64),
            "large": (BATCH, channels, 4 * side, 4 * side),
            "long": (BATCH, channels, 5, 4 * side, 4 * side),
        }
        for shape in shapes.values():
            for steps in (torch.tensor([3.0] * BATCH), torch.tensor([3] * BATCH)):
                for more in (False, True):
                    yield self._inputs(shape, width, steps, more=more)

    def _inputs(
        self, shape: tuple[int, ...], width: int, steps: Tensor, *, more: bool
    ) -> dict[str, Any]:
        rows = shape[1] if len(shape) == 3 else SIDE * SIDE
        pooled = self.of("pooled_projection_dim", "text_embed_2_dim", default=WIDTH)
        made: dict[str, Any] = {
            "sample": torch.randn(shape),
            "hidden_states": torch.randn(shape),
            "x": torch.randn(shape),
            "timestep": steps,
            "r_timestep": steps,
            "timestep_r": steps,
            "encoder_hidden_states": torch.randn(BATCH, WORDS, width),
            "encoder_attention_mask": torch.ones(BATCH, WORDS, dtype=torch.long),
            "pooled_projections": torch.randn(BATCH, pooled),
            "img_ids": torch.zeros(rows, 3),
            "txt_ids": torch.zeros(WORDS, 3),
            "class_labels": torch.tensor([1] * BATCH),
            "controlnet_cond": torch.randn(shape),
            "original_size": torch.tensor([[64.0, 64.0]] * BATCH),
            "target_size": torch.tensor([[64.0, 64.0]] * BATCH),
            "crop_coords": torch.tensor([[0.0, 0.0]] * BATCH),
            "img_shapes": [(1, SIDE, SIDE)] * BATCH,
            "proj_embedding": torch.randn(BATCH, width),
            "num_frames": FRAMES,
            "height": SIDE,
            "width": SIDE,
            "fps": torch.tensor([8] * BATCH),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
            "guidance": torch.tensor([1.0] * BATCH),
        }
        optional = "encoder_hidden_states", "timestep", "pooled_projections", "img_ids"
        optional += "txt_ids", "img_shapes"
        found = {}
        for one in self.taken:
            wanted = one.default is one.empty or one.name in optional
            if one.name in made and (wanted or more):
                found[one.name] = made[one.name]
        return found


def maker(name: str) -> tuple[Maker, str]:
    """How to make a model of this class with inputs.

    Raises:
        Unfit: says why.
    """
    kind = kinds()[name]

    def build() -> Any:
        torch.manual_seed(0)
        model = kind(**tiny(kind))
        for each in model.parameters():  # some start as zeros: nothing would flow
            if each.dim() > 1 and not each.any():
                torch.nn.init.normal_(each, std=0.02)
        return model

    model = build()
    number = sum(p.numel() for p in model.parameters())
    if number > MOST_PARAMETERS:
        raise Unfit(f"{number:,} parameters are too many for a test")
    torch.manual_seed(0)
    inputs = first_of(model, Feeder(model).sets())

    def make(cached: bool) -> Any:
        return build(), copies(inputs)

    return make, name
