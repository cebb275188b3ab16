"""The step loop and its state. Knows no socket, no address and no tensor."""
