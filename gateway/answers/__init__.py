"""Responses: objects of the OpenAI API, as complete bodies and as server-sent events."""
