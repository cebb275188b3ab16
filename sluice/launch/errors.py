"""Errors of the launcher that its modules share."""


class OptionsError(ValueError):
    """Options that contradict each other, or do not fit this machine."""
