"""The systems under test. Each answers a load with a run."""
