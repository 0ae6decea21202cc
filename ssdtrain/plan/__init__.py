"""Which placement each saved tensor gets: pure Python over recorded numbers."""
