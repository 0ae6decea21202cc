"""Predicts training steps that nobody has run: kernels, host, copies, ranks."""
