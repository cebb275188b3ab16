"""The detokenizer: tokens in, text out, by exact incremental decoding with stop strings."""
