"""The load generator behind `sluice bench`: sends requests to a server and measures its answers."""
