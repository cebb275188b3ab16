"""What the launcher refuses."""


class OptionsError(ValueError):
    """Options of a ring that do not go together, or not with this machine."""
