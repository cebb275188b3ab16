"""The systems that are measured. Each takes a load and returns a run."""
