"""Activations placed and rebuilt: step time and peak of every way and the rivals."""
