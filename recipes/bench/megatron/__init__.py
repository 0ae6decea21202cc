"""Megatron-Core on several GPUs: bitwise equality, and its own ways beside ours."""
