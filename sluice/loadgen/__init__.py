"""Sends a load to a server and measures its answers: what `sluice bench` runs."""
