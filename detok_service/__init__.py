"""The detokenizer turns token ids into text: exact incremental decoding, with stop strings."""
