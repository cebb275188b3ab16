"""gRPC in, ring out: validate → tokenize → admit → place → dispatch → stream."""
