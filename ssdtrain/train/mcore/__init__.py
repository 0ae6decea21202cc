"""Megatron-Core: its own model classes and local layer specs, its schedules.

Read down: `parallel` (process groups), `layers` (what the local specs lack without
Transformer Engine), `models` (GPT, BERT, T5), `steps` (their forward steps), `runner`
(one optimizer step), `indexed` (Megatron's own datasets).
"""
