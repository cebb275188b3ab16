"""Guided decoding: which tokens a schema, an expression or a grammar allows next.

Only what runs in the processes of its own (`template`, `guide_worker` and what these import) imports `llguidance`.
"""
