"""Descriptions of ATen's operators; elementwise ones are known by torch's tags."""

from typing import Any

import torch

from ssdtrain.tools.search import describe_products, describe_rows, describe_views
from ssdtrain.tools.search.calls import OperatorCall, describer_of
from ssdtrain.tools.search.language import Description

FAMILIES = (describe_products, describe_rows, describe_views)
"""Modules that register descriptions when they are loaded."""
ELEMENTWISE = frozenset(
    f"aten::{name}"
    for name in (
        "_to_copy alias bernoulli copy detach dropout elu_backward empty_like fill "
        "full_like gelu_backward hardsigmoid_backward hardswish hardswish_backward "
        "hardtanh_backward leaky_relu_backward lift_fresh log_sigmoid_backward "
        "mish_backward native_dropout ones_like positive rand_like randn_like rrelu "
        "silu_backward softplus_backward softshrink_backward zero zeros_like"
    ).split()
)
"""Next to those that torch tags as pointwise."""


def describe_call(call: OperatorCall) -> Description | None:
    """Return an operator's description; None: it has none, and runs whole."""
    own = describer_of(call.name)
    if own is not None:
        return own(call)
    return describe_rows.elementwise(call) if is_elementwise(call.func) else None


def is_elementwise(func: Any) -> bool:
    """True if an element of the result reads one element of each operand."""
    name = str(func._schema.name).removesuffix("_")
    return torch.Tag.pointwise in func.tags or name in ELEMENTWISE
