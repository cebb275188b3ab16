"""Connects the engine's core to the ring: receives messages, sends rows and heartbeats. Does not use torch."""
