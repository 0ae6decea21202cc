"""Backbones of timm: the smallest model of every module."""

import re
from typing import Any

import timm
import torch

from tests.ssdtrain.zoo.judge import Maker
from tests.ssdtrain.zoo.of_transformers import Unfit, copies, first_of

MOST_PARAMETERS = 14_000_000
SMALL = re.compile(
    r"nano|atto|femto|pico|zepto|tiny|(^|_)(t|xxs|xs|s0|m0|b0|t0|0|050|small)($|_)|18|x0_"
)
NUM_TRIED = 6
"""Models of a module that are weighed on the meta device."""
SIZES = (64, 96, 128, 224, 256)
"""Pixels: the first with which a model runs."""


def names() -> list[str]:
    """Of all modules."""
    return list(timm.list_modules())


def smallest(module: str) -> str:
    """Name of the model with the fewest parameters, of those whose names say so."""
    own = timm.list_models(module=module)
    own.sort(key=lambda n: (not n.startswith("test_"), not SMALL.search(n), len(n)))
    found = {}
    for name in own[:NUM_TRIED]:
        try:
            with torch.device("meta"):
                model = timm.create_model(name, num_classes=4)
        except Exception:  # of one that makes its parts from numbers
            continue
        found[name] = sum(p.numel() for p in model.parameters())
    return min(found, key=found.__getitem__) if found else own[0]


def maker(module: str) -> tuple[Maker, str]:
    """How to make the smallest model of a module with an image.

    Raises:
        Unfit: says why.
    """
    name = smallest(module)
    error: Exception | None = None
    for size in SIZES:
        try:
            return _of_size(name, size), f"{name}, {size} pixels"
        except Exception as caught:
            error = caught
    raise Unfit(f"{name}: {error}")


def _of_size(name: str, size: int) -> Maker:
    def build() -> Any:
        torch.manual_seed(0)
        try:
            return timm.create_model(name, num_classes=4, img_size=size)
        except TypeError:
            return timm.create_model(name, num_classes=4)

    model = build()
    number = sum(p.numel() for p in model.parameters())
    if number > MOST_PARAMETERS:
        raise Unfit(f"{number:,} parameters are too many for a test")
    channels = model.default_cfg.get("input_size", (3,))[0]
    torch.manual_seed(0)
    image = torch.randn(2, channels, size, size)

    inputs = first_of(model, [{"x": image}])

    def make(cached: bool) -> Any:
        return build(), copies(inputs)

    return make
