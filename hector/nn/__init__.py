"""Drop-in replacements of PyG's relational layers."""

from hector.nn.hgt import HGTConv
from hector.nn.rgat import RGATConv
from hector.nn.rgcn import RGCNConv

__all__ = ["HGTConv", "RGATConv", "RGCNConv"]
