"""Searches for ways to split a model: against brute force, and beside baselines."""
