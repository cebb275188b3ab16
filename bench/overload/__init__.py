"""Overload: more requests than the ring can serve."""
