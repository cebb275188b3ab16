"""Request bodies: what clients may send, and the options of the ring that follow from it."""
