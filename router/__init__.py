"""The router serves the gRPC API: validate → tokenize → admit → place → dispatch → stream."""
