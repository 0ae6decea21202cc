"""The function of verl 0.9 that its switch calls."""

from typing import Any


def enable_activation_offloading(
    model: Any, strategy: str, enable_ckpt: bool = False
) -> None:
    raise RuntimeError("verl's own offloading needs a GPU")
