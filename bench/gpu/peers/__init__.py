"""Other systems on the same shape with random weights, each in its own process."""
