"""The gRPC services, the messages that they send, and the ports that they listen on."""
