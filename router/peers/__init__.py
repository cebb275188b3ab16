"""Engines and detokenizers: which there are, what they report, which of them gets a request."""
