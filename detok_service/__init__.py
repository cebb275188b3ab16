"""Tokens in, text out: incremental exact decoding and stop strings."""
