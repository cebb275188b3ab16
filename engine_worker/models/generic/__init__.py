"""Any decoder-only architecture of transformers over the paged cache: its own module, with our attention inside.

Imports transformers, which takes seconds: imported only for a checkpoint that needs it.
"""
