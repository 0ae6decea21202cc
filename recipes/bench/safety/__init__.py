"""Searches for wrong gradients: random graphs, faults, sanitizers, verification."""
