"""More than there is room for: who is refused, who waits, and who does not."""
