"""Drop-in replacements of PyG's relational layers."""

from hector.nn.explain import explainable, masked
from hector.nn.hgt import HGTConv
from hector.nn.rgat import RGATConv
from hector.nn.rgcn import FastRGCNConv, RGCNConv

__all__ = [
    "FastRGCNConv",
    "HGTConv",
    "RGATConv",
    "RGCNConv",
    "explainable",
    "masked",
]
