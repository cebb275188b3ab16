"""`sluice top`: the ring on a terminal."""
