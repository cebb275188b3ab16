"""Guided decoding: which tokens a JSON schema, a regular expression or a grammar allows next.

Only modules of the separate processes (`template`, `guide_worker` and what they import) import `llguidance`.
"""
