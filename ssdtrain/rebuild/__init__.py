"""Recipes that rebuild a saved tensor from another saved tensor."""
