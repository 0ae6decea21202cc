"""Relational layers against PyG, and every generated kernel against an oracle."""
