"""A ring whose services die while streams run: whether each stream still is what it would have been."""
