"""Text to batches: `sources` (which text), `vocabulary` (text to ids), `tokens` (the
memory-mapped token file), `batches` (deterministic micro-batches from it)."""
