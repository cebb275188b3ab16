"""Text to token ids and back, for the front door: tokenizer, chat template, vocabulary."""
