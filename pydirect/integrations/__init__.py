"""Adapters to GNN frameworks; each imports its framework only when it is used."""
