"""Measures the engine, the ring around it and what users could take instead, and draws the plots."""
