"""The router serves the gRPC API: parse → tokenize → admit → place → dispatch → stream."""
