"""Megatron-Core: its own model classes and local layer specs, its schedules. Read down:
`parallel` (process groups), `layers` (what local specs lack), `models`, `steps` (their
forward steps), `runner` (one optimizer step), `indexed` (Megatron's own datasets)."""
