"""Who runs the training step; the only code that patches modules and frameworks."""
