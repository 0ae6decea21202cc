"""`dgl.nn`: see `hector.message.nn`."""

from typing import Any

from hector.message.dgl.nn import functional
from hector.message.nn import *  # noqa: F403

__all__ = ["functional"]


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"dgl.nn.{name} is not taken; docs/message-passing.md names the layers that "
        "are, and others are a few lines of update_all and apply_edges"
    )
