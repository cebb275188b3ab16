"""Parsers that find reasoning and tool calls in a model's output, complete or streamed."""
