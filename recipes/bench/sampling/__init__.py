"""Neighbour sampling: rates, distributions, epochs."""
