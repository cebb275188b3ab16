"""What is sent back: objects of the OpenAI API, whole and as server-sent events."""
