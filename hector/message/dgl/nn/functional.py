"""`dgl.nn.functional`."""

from hector.message.joined import edge_softmax

__all__ = ["edge_softmax"]
