"""Rows of host memory gathered by the GPU."""
