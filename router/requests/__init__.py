"""A request's life: admitted, placed, submitted, recovered, ended; one state, one log of its tokens."""
