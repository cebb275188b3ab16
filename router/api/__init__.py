"""gRPC in and out: the services, the messages they answer with, the ports they listen on."""
