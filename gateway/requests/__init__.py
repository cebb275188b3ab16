"""Request bodies: the fields that clients may send, and their translation into options of the ring."""
