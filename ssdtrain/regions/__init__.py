"""Regions: repeated modules whose forward can run again in backward."""
