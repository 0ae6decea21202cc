"""`dgl.nn.pytorch`: see `hector.message.nn`."""

from hector.message.dgl.nn.functional import edge_softmax
from hector.message.nn import *  # noqa: F403

__all__ = ["edge_softmax"]
