"""Shared by all topics: loads, running systems in turns, statistics, plots, tables, child processes."""
