"""`dgl.nn.functional`."""

from hector.message.relation import edge_softmax

__all__ = ["edge_softmax"]
