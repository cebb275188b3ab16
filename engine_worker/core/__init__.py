"""The step loop and its state. Independent of sockets, addresses and tensors."""
