"""When the sequences of a step draft: if what is expected to be accepted outweighs what it costs."""

PLAIN = 0.010
