"""What is measured: figures, each beside what the device can do in the same run."""
