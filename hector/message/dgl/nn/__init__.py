"""`dgl.nn`: see `hector.message.nn`."""

from hector.message.dgl.nn import functional
from hector.message.nn import *  # noqa: F403

__all__ = ["functional"]
