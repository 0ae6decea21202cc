"""Saved tensors that are made again from other saved tensors.

recipes.py names the operators, and how each runs again. finder.py looks for the recipe
of a tensor: node.py shows a recipe the autograd node, and graph.py reads the graph.
compiled.py asks what was read again in later steps. frame.py, purity.py and between.py
prove that nobody wrote to what a recipe passes. admission.py compares bytes.
expression.py runs what was found.
"""
