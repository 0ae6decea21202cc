"""Graphs: read from a directory the user gives, or generated. Nothing is downloaded."""
