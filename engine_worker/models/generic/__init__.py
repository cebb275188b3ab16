"""The adapter: any decoder-only architecture of transformers, as its own module with our paged attention inside.

Imported only for a checkpoint that needs it: transformers takes seconds to import.
"""
