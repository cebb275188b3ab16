"""The HTTP gateway: OpenAI's API for a ring, of which it is an ordinary client."""
