"""What a run says about itself: the end-of-run table, the memory picture, the trace."""
