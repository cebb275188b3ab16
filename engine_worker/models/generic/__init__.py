"""The adapter: runs decoder-only architectures without a native implementation as transformers' modules, with our paged
attention in place of theirs.

Imported only for a checkpoint that needs it: importing transformers takes seconds.
"""
