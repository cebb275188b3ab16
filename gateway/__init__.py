"""The HTTP gateway serves OpenAI's API. It is an ordinary client of the ring's routers."""
