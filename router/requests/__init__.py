"""A request's life: admission, placement, submission, recovery, end. One state and one log of tokens per request."""
