"""One question per module: how it is measured, and its words and picture."""
