"""Decides which sequences hold memory (capacity) and which of them run in the next step (micro batch): two
interchangeable classes."""
