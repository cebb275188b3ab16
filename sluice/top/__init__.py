"""`sluice top`: a live view of the ring in a terminal."""
