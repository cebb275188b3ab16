"""Benchmarks of the engine, the ring and alternatives to them, with plots and a page of results."""
