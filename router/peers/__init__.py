"""Engines and detokenizers: membership, what they report, and placement of requests."""
