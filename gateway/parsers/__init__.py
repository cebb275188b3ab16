"""Finds reasoning and tool calls in the text of a model, whole or piece by piece."""
