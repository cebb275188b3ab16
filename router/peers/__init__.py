"""Engines and detokenizers: which there are, what they report, where work goes."""
