"""Training systems side by side: the same model and data in each, one step at a time in turn."""
