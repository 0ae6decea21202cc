"""What a layer takes on one rank of a tensor-parallel group: time, memory, weights.

A rank's part of a decoder is a decoder with fewer heads, a narrower feed-forward part
and fewer words. Two depths of it are captured and priced as `ssdtrain fits` does; the
difference is a layer, the rest are the ends (embedding, head, loss).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ssdtrain.errors import ConfigError
from ssdtrain.tools.foresight.device import Device
from ssdtrain.tools.foresight.spec import links_of
from ssdtrain.tools.report.build_public import Shape, public_subject
from ssdtrain.tools.report.estimate import estimate
from ssdtrain.tools.report.fits import Captured, priced_ways

HEADS, GROUPS = "num_attention_heads", "num_key_value_heads"
WIDE, WORDS, HIDDEN = "intermediate_size", "vocab_size", "hidden_size"
DECODERS = ("gemma2", "llama", "mistral", "qwen2", "qwen3")
"""Kinds of models whose tensor-parallel parts are known."""


@dataclass(frozen=True, kw_only=True)
class PerLayer:
    """A figure of one layer, and of both ends together."""

    layer: float
    ends: float

    def of(self, layers: float) -> float:
        """Return the figure of so many layers and the ends."""
        return self.layer * layers + self.ends


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """One micro-batch on one rank of a tensor-parallel group."""

    milliseconds: Mapping[str, PerLayer]
    """By way to keep activations, such as "plain" and "checkpointing"."""
    activation_bytes: Mapping[str, PerLayer]
    parameters: PerLayer
    """A count."""


def tensor_degrees(shape: Shape, most: int) -> list[int]:
    """Return powers of two that divide heads, width and words.

    Raises:
        ConfigError: the model is no decoder whose parts are known.
    """
    kind = shape.values["model_type"]
    if kind not in DECODERS:
        raise ConfigError(
            f"a search of layouts expects one of {', '.join(DECODERS)}, got {kind}"
        )
    found, degree = [], 1
    while degree <= most:
        if all(shape.values[name] % degree == 0 for name in (HEADS, WIDE, WORDS)):
            found.append(degree)
        degree *= 2
    return found


def part_of(shape: Shape, degree: int) -> Shape:
    """Return one rank's part under tensor parallelism."""
    values: dict[str, Any] = dict(shape.values)
    values.setdefault("head_dim", values[HIDDEN] // values[HEADS])
    groups = values.get(GROUPS, values[HEADS])
    values[GROUPS] = max(1, groups // degree)
    for name in (HEADS, WIDE, WORDS):
        values[name] //= degree
    return replace(shape, values=values)


def stage_costs(
    shape: Shape, degree: int, sequences: int, tokens: int, device: Device
) -> StageCosts:
    """Capture and price one rank's part.

    Args:
        shape: of the whole model.
        degree: of tensor parallelism.
        sequences: of a micro-batch.
        tokens: of a sequence.
        device: prices operators.
    """
    part = part_of(shape, degree)
    few, more = 2 * shape.period, 4 * shape.period
    small, large = (
        _captured(part.with_layers(number), sequences, tokens, device)
        for number in (few, more)
    )
    ways, deep = priced_ways(small), priced_ways(large)

    def line(at: int, name: str) -> PerLayer:
        base = (small.profile.base_bytes, large.profile.base_bytes) if at else (0, 0)
        first, second = ways[name][at] - base[0], deep[name][at] - base[1]
        return _line(first, second, few, more)

    return StageCosts(
        milliseconds={name: line(0, name) for name in ways},
        activation_bytes={name: line(1, name) for name in ways},
        parameters=_line(small.weights, large.weights, few, more),
    )


def _line(first: float, second: float, few: int, more: int) -> PerLayer:
    layer = (second - first) / (more - few)
    return PerLayer(layer=layer, ends=first - few * layer)


def _captured(shape: Shape, sequences: int, tokens: int, device: Device) -> Captured:
    with torch.device("meta"):
        model = public_subject(shape, tokens).model
        words = torch.zeros((sequences, tokens), dtype=torch.long, device="meta")
        found = estimate(
            model,
            lambda: model(input_ids=words, labels=words).loss,
            links_of(device.spec),
            device,
            min_bytes=1,
        )
    count = sum(parameter.numel() for parameter in model.parameters())
    return Captured(
        profile=found.profile,
        weights=count,
        gradients=0,
        optimizer=0,
        stored=found.stored,
    )
