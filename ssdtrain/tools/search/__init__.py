"""Searches for ways to split a model over devices, and runs what it finds."""
