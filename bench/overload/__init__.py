"""More requests than there is room for: who is rejected, who waits, and who is not affected."""
