"""Tokenization, detokenization and chat templates."""
