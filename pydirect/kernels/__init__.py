"""CUDA kernels, compiled at first use, and the shims that reach them."""
