"""Mixtures of experts: the dense decoder that computes as much (`each * width` wide),
and what is next to it: copies of every token to its experts and back, and all
weights."""

from dataclasses import dataclass, replace

from ssdtrain.tools.report.build_public import Shape

WIDE = "intermediate_size"
DENSE = {"mixtral": "mistral", "qwen3_moe": "qwen3"}
"""The kind of model that a layer is like when its experts are one."""
PRODUCTS = 3
"""Matrices of an expert: gate, up and down."""
PASSES = 3
"""Times a step reads an expert's weights or writes their gradients."""


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Of each layer."""

    number: int
    each: int
    """Experts of a token."""
    width: int
    """Of the feed-forward part of one."""

    def parameters(self, hidden: int) -> int:
        """Return those of all experts of a layer."""
        return self.number * PRODUCTS * hidden * self.width

    def copied_bytes(self, hidden: int) -> int:
        """Return what a token's copies take: sent to its experts, in bf16."""
        return self.each * hidden * 2


def experts_of(shape: Shape) -> Experts | None:
    """Return a model's experts; None: it is dense."""
    values = shape.values
    if values["model_type"] not in DENSE:
        return None
    return Experts(
        number=values.get("num_experts") or values["num_local_experts"],
        each=values["num_experts_per_tok"],
        width=values.get("moe_intermediate_size") or values[WIDE],
    )


def dense_of(shape: Shape) -> Shape:
    """Return the dense model that computes as much; itself if it is one."""
    experts = experts_of(shape)
    if experts is None:
        return shape
    values = {
        **shape.values,
        "model_type": DENSE[shape.values["model_type"]],
        WIDE: experts.each * experts.width,
    }
    return replace(shape, values=values)
