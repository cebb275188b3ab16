"""Other systems on the same shape with random weights, each in a process of its own."""
